"""The whole service on this machine, started in order and kept running."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import httpx

from deploy.local import environment, keys
from deploy.local.environment import Ports
from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT, Place
from deploy.local.machine.ports import accepts, is_free
from deploy.local.machine.processes import Process, Program, end_leftovers, run_command, running
from deploy.local.machine.waiting import wait_until
from deploy.local.servers.lookup import both
from deploy.local.servers.server import Server

_CONVEYANCER = "demo-conveyancer"
_COMMAND_SECONDS = 60.0
_READY_SECONDS = 60.0
_SHOW_WAIT_SECONDS = 5.0
_TOKEN_SECONDS = 24 * 60 * 60
_RESTARTS_A_MINUTE = 5


@dataclass(frozen=True)
class Stack:
    """A stack that is ready: its addresses and its processes."""

    variables: Mapping[str, str]
    servers: tuple[Server, ...]
    mail_catcher: Process
    restarted: tuple["Restarted", ...]

    def look_after(self, place: Place) -> None:
        """Restart API or worker if one has died. Raises LocalStackError if anything else has."""
        for trouble in [server.trouble() for server in self.servers]:
            if trouble:
                raise LocalStackError(f"{trouble} Its log, if it runs here, is in {place.folder / 'logs'}.")
        if trouble := self.mail_catcher.trouble():
            raise LocalStackError(self.mail_catcher.describe(trouble))
        for process in self.restarted:
            process.restart_if_dead(place)


@dataclass(frozen=True)
class Restarted:
    """A process that users may kill, to see what happens: it is restarted, five times a minute at most."""

    process: Process
    deaths: deque[float] = field(default_factory=partial(deque, maxlen=_RESTARTS_A_MINUTE + 1))

    def restart_if_dead(self, place: Place) -> None:
        """Start the process again if it has died. Raises LocalStackError if it keeps dying."""
        trouble = self.process.trouble()
        if trouble is None:
            return
        self.deaths.append(time.monotonic())
        if len(self.deaths) > _RESTARTS_A_MINUTE and self.deaths[-1] - self.deaths[0] < 60:
            raise LocalStackError(self.process.describe(f"{trouble} It keeps dying."))
        self.process.restart()
        place.report(f"{trouble} Started again as process {self.process.pid}.")


@contextmanager
def running_stack(place: Place, ports: Ports) -> Iterator[Stack]:
    """Start everything, yield it when it is ready, and stop it in reverse order.

    The caller holds the claim on the folder.
    """
    env_file = place.folder / "env"
    with ExitStack() as parts:
        place.folder.mkdir(parents=True, exist_ok=True)
        env_file.unlink(missing_ok=True)
        end_leftovers(place.folder)
        _check_ports(ports)
        keys.write_signing_key(place.folder / "signing-key.pem", place.folder / "jwks.json")
        mail_catcher = parts.enter_context(running(_mail_catcher(place, ports)))
        servers = parts.enter_context(
            both(place.folder, keep=place.keep, report=place.report, stopping=place.stopping)
        )
        variables = environment.variables(
            place.folder, ports, database_url=servers.postgres.url, amqp_url=servers.rabbitmq.url
        )
        _run(place, variables, "schema", "apply")
        _wait_for_mail_catcher(mail_catcher, ports, place)
        api = parts.enter_context(running(_api(place, variables, ports)))
        worker = parts.enter_context(running(_worker(place, variables, ports)))
        variables |= _register_conveyancer(place, variables)
        _wait_until_ready(api, variables["BASE_URL"], place)
        _wait_until_ready(worker, variables["WORKER_URL"], place)
        parts.callback(env_file.unlink, missing_ok=True)
        environment.write(env_file, variables)
        yield Stack(
            variables, (servers.postgres, servers.rabbitmq), mail_catcher, (Restarted(api), Restarted(worker))
        )


def _check_ports(ports: Ports) -> None:
    """Raise LocalStackError if a port that the user chose is in use."""
    for variable, port in (("PORT", ports.api), ("HEALTH_PORT", ports.worker)):
        if not is_free(port):
            raise LocalStackError(
                f"Port {port} is in use: choose another with {variable}={port + 1} make run."
            )


def _mail_catcher(place: Place, ports: Ports) -> Program:
    options = ("--port", str(ports.smtp), "--folder", place.folder / "mail")
    return Program(
        name="mail catcher",
        command=[sys.executable, "-m", "deploy.local.mail_catcher", *options],
        environment=environment.of_operator({}),
        folder=CHECKOUT,
        log=place.folder / "logs" / "mail-catcher.log",
        pid_file=place.folder / "mail-catcher.pid",
    )


def _api(place: Place, variables: Mapping[str, str], ports: Ports) -> Program:
    return Program(
        name="API",
        command=[sys.executable, "-m", "service", "serve"],
        environment=environment.of_api(variables, ports.api),
        folder=CHECKOUT,
        log=place.folder / "logs" / "api.log",
        pid_file=place.folder / "api.pid",
        stop_seconds=30.0,
    )


def _worker(place: Place, variables: Mapping[str, str], ports: Ports) -> Program:
    return Program(
        name="worker",
        command=[sys.executable, "-m", "worker"],
        environment=environment.of_worker(variables, ports.worker),
        folder=CHECKOUT,
        log=place.folder / "logs" / "worker.log",
        pid_file=place.folder / "worker.pid",
        stop_seconds=30.0,
    )


def _register_conveyancer(place: Place, variables: Mapping[str, str]) -> dict[str, str]:
    """Add the demo conveyancer, and return its access token and its API key."""
    key_file = str(place.folder / "signing-key.pem")
    token = ("token", _CONVEYANCER, "--key", key_file, "--key-id", keys.KEY_ID)
    with ThreadPoolExecutor(1) as thread:
        access_token = thread.submit(_run, place, variables, *token, "--expires-in", str(_TOKEN_SECONDS))
        charges = ("--name", "Demo Conveyancing", "--charges-calculation-fee")
        _run(place, variables, "conveyancer", "add", _CONVEYANCER, *charges)
        api_key = _run(place, variables, "api-key", "create", _CONVEYANCER)
        return {"ACCESS_TOKEN": access_token.result(), "API_KEY": api_key}


def _run(place: Place, variables: Mapping[str, str], *arguments: str) -> str:
    """Run a command of `python -m service` and return its output."""
    return run_command(
        f"python -m service {' '.join(arguments[:2])}",
        [sys.executable, "-m", "service", *arguments],
        environment=environment.of_operator(variables),
        folder=CHECKOUT,
        seconds=_COMMAND_SECONDS,
        stopping=place.stopping,
    )


def _wait_for_mail_catcher(mail_catcher: Process, ports: Ports, place: Place) -> None:
    def accepts_or_died() -> bool:
        return accepts(ports.smtp) or mail_catcher.trouble() is not None

    in_time = wait_until(accepts_or_died, seconds=_READY_SECONDS, stopping=place.stopping)
    trouble = mail_catcher.trouble()
    if trouble or not in_time:
        raise LocalStackError(mail_catcher.describe(trouble or "The mail catcher does not answer."))


def _wait_until_ready(process: Process, url: str, place: Place) -> None:
    """Wait until the process is ready, and report what it lacks every five seconds."""
    name = process.program.name
    shown = time.monotonic()
    lacking: str | None = ""

    def ready_or_died() -> bool:
        nonlocal shown, lacking
        lacking = _lacking(url)
        if lacking is not None and time.monotonic() - shown > _SHOW_WAIT_SECONDS:
            shown = time.monotonic()
            place.report(f"Waiting for the {name}: {lacking}")
        return lacking is None or process.trouble() is not None

    wait_until(ready_or_died, seconds=_READY_SECONDS, stopping=place.stopping, pause_seconds=0.05)
    if lacking is not None:
        trouble = (
            process.trouble() or f"The {name} is not ready after {_READY_SECONDS:.0f} seconds: {lacking}."
        )
        raise LocalStackError(process.describe(trouble))


def _lacking(url: str) -> str | None:
    """Return why the process at *url* is not ready, or None if it is."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False)
    except httpx.HTTPError:
        return "it does not answer yet"
    return None if answer.status_code == httpx.codes.OK else answer.text[:200]
