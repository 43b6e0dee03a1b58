"""The service's processes as they run in production, and commands that run to their end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from deploy.local.errors import LocalStackError
from deploy.local.machine import processes
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.processes import Program
from service.settings import ServiceSettings, Settings
from tests.harness.examples import SECRET_KEYS
from tests.harness.http import NO_TLS
from tests.harness.waiting import until
from worker.settings import EmailSettings, WorkerSettings

# What a process inherits from this one. Its settings, the servers' addresses among them, are given to it.
_INHERITED = ("PATH", "HOME", "LANG")


class Process:
    """A process that can be killed, frozen and started again. One log has the output of all its lives."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str],
        port: int,
        probes_port: int | None = None,
        folder: Path,
    ) -> None:
        self.name, self.port, self.probes_port = name, port, probes_port or port
        self.base_url = f"http://127.0.0.1:{port}"
        self.probes_url = f"http://127.0.0.1:{self.probes_port}"
        self.seconds_to_ready = 0.0  # the last time
        self.log = log = folder / f"{name}-{port}.log"
        self._program = Program(name=name, command=command, environment=environment, folder=CHECKOUT, log=log)
        self._running: processes.Process | None = None

    def start(self) -> None:
        if self._running is None:
            self._running = processes.Process(self._program)
        else:
            self._running.restart()

    @property
    def running(self) -> processes.Process:
        assert self._running is not None, f"{self.name} was never started"
        return self._running

    def terminate(self) -> None:
        self.running.send_signal(signal.SIGTERM)

    async def stop(self) -> int:
        self.terminate()
        return await self.exit_status()

    def freeze(self) -> None:
        self.running.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.running.send_signal(signal.SIGCONT)

    async def kill(self) -> int:
        self.running.send_signal(signal.SIGKILL)
        return await self.exit_status()

    async def exit_status(self, *, seconds: float = 30.0) -> int:
        """Wait for its end and return the exit status. Raises TimeoutError."""
        await until(lambda: not self.is_running, seconds=seconds, pause_seconds=0.01)
        status = self.running.exit_status
        if status is None:
            raise TimeoutError(f"{self.name} does not end within {seconds:.0f} s")
        return status

    def end(self) -> None:
        """Kill it if it still runs, and print the end of its log, which pytest shows on failure."""
        if self._running is not None:
            self._running.send_signal(signal.SIGKILL)
            self._running.stop()
        print(f"--- {self.log}", self.output[-4000:], sep="\n")  # noqa: T201

    @property
    def is_running(self) -> bool:
        return self._running is not None and self._running.exit_status is None

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    async def becomes_ready(self, path: str = "/readyz") -> None:
        """Wait until its readiness probe answers with 200. Raises LocalStackError."""
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=self.probes_url, timeout=10, verify=NO_TLS) as client:

            async def answers() -> bool:
                self.check()
                with suppress(httpx.TransportError):
                    # The API is ready some milliseconds before its port opens.
                    return (await client.get(path)).status_code == 200 and accepts(self.port)
                return False

            if not await until(answers, seconds=60.0, pause_seconds=0.03):
                raise LocalStackError(f"The {self.name} does not answer {path} with 200.")
        self.seconds_to_ready = time.monotonic() - began

    def check(self) -> None:
        if self._running is not None and (trouble := self._running.trouble()):
            raise LocalStackError(trouble)

    def rss_megabytes(self) -> float:
        return int(self.status("VmRSS:")) * 1024 / 1e6

    def peak_megabytes(self) -> float:
        return int(self.status("VmHWM:")) * 1024 / 1e6

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.running.pid}/fd").iterdir()))

    def ignores(self, number: signal.Signals) -> bool:
        return bool(int(self.status("SigIgn:"), base=16) >> (number - 1) & 1)

    def status(self, name: str) -> str:
        return Path(f"/proc/{self.running.pid}/status").read_text().partition(name)[2].split()[0]


def api_process(settings: ServiceSettings, folder: Path, **variables: str) -> Process:
    port, probes_port = free_port(), free_port()
    environment = environment_of(settings, PORT=str(port), HEALTH_PORT=str(probes_port), **variables)
    command = python("service", "serve")
    return Process("api", command, environment=environment, port=port, probes_port=probes_port, folder=folder)


def worker_process(settings: WorkerSettings, folder: Path, *roles: str, **variables: str) -> Process:
    port = free_port()
    environment = environment_of(settings, HEALTH_PORT=str(port), **variables)
    return Process("worker", python("worker", *roles), environment=environment, port=port, folder=folder)


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


@asynccontextmanager
async def started(*processes: Process, ready: bool = True) -> AsyncIterator[None]:
    """Run *processes* until the block is left, then stop them; kill them if the block failed."""
    async with AsyncExitStack() as stack:
        for process in processes:
            stack.callback(process.end)
            process.start()
        if ready:
            await asyncio.gather(*(process.becomes_ready() for process in processes))
        yield
        running = [process for process in processes if process.is_running]
        await asyncio.gather(*(process.stop() for process in running))


class Ended(msgspec.Struct, frozen=True):
    status: int
    output: str
    errors: str


async def run_process(*command: str, environment: Mapping[str, str], seconds: float = 60.0) -> Ended:
    """Run `python -m` *command* to its end, in a process of its own. See also `in_process.run`."""
    ended = await asyncio.to_thread(
        subprocess.run,
        python(*command),
        cwd=CHECKOUT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def bare_environment(**variables: str) -> dict[str, str]:
    """Return an environment without any setting of the service but *variables*."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ} | variables


def email_settings(**given: Any) -> EmailSettings:
    """Return the settings of a worker. A server whose URL is not given does not exist."""
    usual = {
        "database_url": "postgresql://nowhere.invalid/",
        "app_url": "https://app.example.com",
        "request_secret_keys": SECRET_KEYS,
        "amqp_url": "amqp://nowhere.invalid/",
        "smtp_url": "smtp://nowhere.invalid",
        "mail_from": "Calculations <calculations@service.example.com>",
    }
    return EmailSettings(**(usual | given))


def environment_of(settings: Settings, **variables: str) -> dict[str, str]:
    values = msgspec.structs.asdict(settings).items()
    given = {name.upper(): str(value) for name, value in values if value is not None}
    return bare_environment(**(given | variables))
