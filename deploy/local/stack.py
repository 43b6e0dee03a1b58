"""The whole service on this machine, started in order and kept running."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx

from deploy.local import environment, keys
from deploy.local.environment import Ports
from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT, Place
from deploy.local.machine.ports import accepts, is_free
from deploy.local.machine.processes import Process, Program, run_command, running, wait_for
from deploy.local.servers import lookup
from deploy.local.servers.server import Server

_CONVEYANCER = "demo-conveyancer"
_COMMAND_SECONDS = 60.0
_READY_SECONDS = 60.0
_TOKEN_SECONDS = 24 * 60 * 60


@dataclass(frozen=True)
class Stack:
    """A stack that is ready: its addresses and its processes."""

    variables: Mapping[str, str]
    servers: Sequence[Server]
    mail_catcher: Process
    restarted: Sequence[Process]  # API and worker, which users may kill to see what happens

    def look_after(self, place: Place) -> None:
        """Restart API or worker if one has died. Raises LocalStackError if anything else has."""
        for trouble in [server.trouble() for server in self.servers]:
            if trouble:
                raise LocalStackError(f"{trouble} Its log, if it runs here, is in {place.folder / 'logs'}.")
        if trouble := self.mail_catcher.trouble():
            raise LocalStackError(self.mail_catcher.describe(trouble))
        for process in self.restarted:
            if trouble := process.trouble():
                process.restart()
                _write_pid(process, place)
                place.report(f"{trouble} Started again as process {process.pid}.")


@contextmanager
def running_stack(place: Place, ports: Ports) -> Iterator[Stack]:
    """Start everything, yield it when it is ready, and stop it in reverse order.

    The caller holds the claim on the folder.
    """
    env_file = place.folder / "env"
    with ExitStack() as parts:
        place.folder.mkdir(parents=True, exist_ok=True)
        env_file.unlink(missing_ok=True)
        _check_ports(ports)
        keys.write_signing_key(place.folder / "signing-key.pem", place.folder / "jwks.json")
        mail_catcher = parts.enter_context(running(_mail_catcher(place, ports)))
        postgres = parts.enter_context(lookup.postgres(place.folder, keep=place.keep, report=place.report))
        rabbitmq = parts.enter_context(lookup.rabbitmq(place.folder, keep=place.keep, report=place.report))
        variables = environment.variables(
            place.folder, ports, database_url=postgres.url, amqp_url=rabbitmq.url
        )
        _run(variables, "schema", "apply")
        wait_for(mail_catcher, lambda: accepts(ports.smtp), seconds=_READY_SECONDS)
        api = _started(parts, place, "api", ["service", "serve"], environment.of_api(variables, ports.api))
        worker = _started(parts, place, "worker", ["worker"], environment.of_worker(variables, ports.worker))
        variables |= _register_conveyancer(place, variables)
        wait_for(api, lambda: is_ready(variables["BASE_URL"]), seconds=_READY_SECONDS)
        wait_for(worker, lambda: is_ready(variables["WORKER_URL"]), seconds=_READY_SECONDS)
        parts.callback(env_file.unlink, missing_ok=True)
        environment.write(env_file, variables)
        yield Stack(variables, (postgres, rabbitmq), mail_catcher, (api, worker))


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
        environment=os.environ,
        folder=CHECKOUT,
        log=place.folder / "logs" / "mail-catcher.log",
    )


def _started(
    parts: ExitStack, place: Place, name: str, words: Sequence[str], variables: Mapping[str, str]
) -> Process:
    """Start a process of the service, with its id in a file for scripts."""
    program = Program(
        name=name,
        command=[sys.executable, "-m", *words],
        environment=variables,
        folder=CHECKOUT,
        log=place.folder / "logs" / f"{name}.log",
        stop_seconds=30.0,
    )
    process = parts.enter_context(running(program))
    _write_pid(process, place)
    parts.callback((place.folder / f"{name}.pid").unlink, missing_ok=True)
    return process


def _write_pid(process: Process, place: Place) -> None:
    (place.folder / f"{process.program.name}.pid").write_text(f"{process.pid}\n")


def _register_conveyancer(place: Place, variables: Mapping[str, str]) -> dict[str, str]:
    """Add the demo conveyancer, and return its access token and its API key."""
    charges = ("--name", "Demo Conveyancing", "--charges-calculation-fee")
    _run(variables, "conveyancer", "add", _CONVEYANCER, *charges)
    key = ("--key", str(place.folder / "signing-key.pem"), "--key-id", keys.KEY_ID)
    token = _run(variables, "token", _CONVEYANCER, *key, "--expires-in", str(_TOKEN_SECONDS))
    return {"ACCESS_TOKEN": token, "API_KEY": _run(variables, "api-key", "create", _CONVEYANCER)}


def _run(variables: Mapping[str, str], *arguments: str) -> str:
    """Run a command of `python -m service` and return its output."""
    return run_command(
        f"python -m service {' '.join(arguments[:2])}",
        [sys.executable, "-m", "service", *arguments],
        environment={**os.environ, **variables},
        folder=CHECKOUT,
        seconds=_COMMAND_SECONDS,
    )


def is_ready(url: str) -> bool:
    """Return whether the process at *url* is ready."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False
