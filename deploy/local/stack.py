"""The whole service on this machine, started in order and kept running."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.local import environment, keys
from deploy.local.environment import Ports
from deploy.local.errors import LocalStackError
from deploy.local.machine import ports as tcp
from deploy.local.machine.folders import CHECKOUT, Place
from deploy.local.machine.processes import Process, Program, run_command, running, wait_for
from deploy.local.servers import clients, lookup
from deploy.local.servers.server import Server

_CONVEYANCER = "demo-conveyancer"
_COMMAND_SECONDS = 60.0
_READY_SECONDS = 60.0
_RESTARTS_SECONDS = 30.0  # A process that was started five times in this time cannot run.
_TOKEN_SECONDS = 24 * 60 * 60


@dataclass(frozen=True)
class Stack:
    """A stack that is ready: its addresses and its processes."""

    variables: Mapping[str, str]
    servers: Sequence[Server]
    processes: Sequence[Process]  # Users may kill them to see what happens.
    journey_url: str

    def look_after(self, place: Place) -> None:
        """Restart each process that has died. Raises LocalStackError if it cannot run."""
        for server in self.servers:
            if server.process is None and (trouble := server.trouble()):
                raise LocalStackError(f"{trouble} Run `make run` again.")
        for process in self.processes:
            if trouble := process.trouble():
                if time.monotonic() - process.starts[0] < _RESTARTS_SECONDS:
                    raise LocalStackError(process.describe(trouble))
                process.restart()
                _pid_file(process, place).write_text(f"{process.pid}\n")
                place.report(f"{trouble} Started again as process {process.pid}.")


@contextmanager
def running_stack(place: Place, ports: Ports) -> Iterator[Stack]:
    """Start everything, yield it when it is ready, and stop it in reverse order.

    The caller holds the claim on the folder.
    """
    env_file = place.folder / "env"
    with ExitStack() as parts:
        env_file.unlink(missing_ok=True)
        _check_ports(ports)
        keys.write_signing_key(place.folder / "signing-key.pem", place.folder / "jwks.json")
        catching = ["deploy.local.mail_catcher", str(ports.smtp), str(place.folder / "mail")]
        mail_catcher = _started(parts, place, "mail-catcher", catching, os.environ)
        postgres = parts.enter_context(lookup.postgres(place))
        rabbitmq = parts.enter_context(lookup.rabbitmq(place))
        variables = environment.variables(
            place.folder, ports, database_url=postgres.url, amqp_url=rabbitmq.url
        )
        clients.write(place, "psql", postgres)
        clients.write(place, "rabbitmqctl", rabbitmq)
        _run(variables, "schema", "apply")
        wait_for(mail_catcher, lambda: tcp.accepts(ports.smtp), seconds=_READY_SECONDS)
        api = _started(parts, place, "api", ["service", "serve"], environment.of_api(variables, ports))
        worker = _started(parts, place, "worker", ["worker"], environment.of_worker(variables, ports.worker))
        variables |= _register_conveyancer(place, variables)
        if rabbitmq.client:
            variables |= clients.account_of_calculator(place, rabbitmq.url)
        wait_for(api, lambda: is_ready(variables["API_PROBES_URL"]), seconds=_READY_SECONDS)
        wait_for(worker, lambda: is_ready(variables["WORKER_URL"]), seconds=_READY_SECONDS)
        of_journey = environment.of_journey(variables, ports.journey)
        journey = _started(parts, place, "journey", ["deploy.local.journey"], of_journey)
        wait_for(journey, lambda: tcp.accepts(ports.journey), seconds=_READY_SECONDS)
        parts.callback(env_file.unlink, missing_ok=True)
        environment.write(env_file, variables)
        servers = (postgres, rabbitmq)
        of_servers = (server.process for server in servers if server.process)
        processes = (mail_catcher, *of_servers, api, worker, journey)
        for process in processes:
            _pid_file(process, place).write_text(f"{process.pid}\n")
            parts.callback(_pid_file(process, place).unlink, missing_ok=True)
        yield Stack(variables, servers, processes, journey_url=f"http://127.0.0.1:{ports.journey}")


def _check_ports(ports: Ports) -> None:
    """Raise LocalStackError if a port that the user chose cannot be used."""
    if ports.api == ports.journey:
        raise LocalStackError(f"PORT and JOURNEY_PORT are both {ports.api}: change one of them.")
    for variable, port in (("PORT", ports.api), ("JOURNEY_PORT", ports.journey)):
        if trouble := tcp.trouble(port):
            other = max(port + 1, 8001)  # Ports below 1024 are root's.
            raise LocalStackError(
                f"Port {port} cannot be used ({trouble}): choose another with {variable}={other} make run."
            )


def _started(
    parts: ExitStack, place: Place, name: str, words: Sequence[str], variables: Mapping[str, str]
) -> Process:
    """Start `python -m` *words*."""
    program = Program(
        name=name,
        command=[sys.executable, "-m", *words],
        environment=variables,
        folder=CHECKOUT,
        log=place.folder / "logs" / f"{name}.log",
    )
    return parts.enter_context(running(program))


def _pid_file(process: Process, place: Place) -> Path:
    return place.folder / f"{process.program.log.stem}.pid"


def _register_conveyancer(place: Place, variables: Mapping[str, str]) -> dict[str, str]:
    """Add the demo conveyancer, and return its access token and an API key."""
    charges = ("--name", "Demo Conveyancing", "--charges-calculation-fee")
    _run(variables, "conveyancer", "add", _CONVEYANCER, *charges)
    key = ("--key", str(place.folder / "signing-key.pem"), "--key-id", keys.KEY_ID)
    token = _run(variables, "token", _CONVEYANCER, *key, "--expires-in", str(_TOKEN_SECONDS))
    return {"ACCESS_TOKEN": token, "API_KEY": _run(variables, "api-key", "create", "our-page")}


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
    """Return whether the process with its probes at *url* is ready."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False
