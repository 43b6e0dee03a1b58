"""The processes of the service as they run in production, and commands that run to their end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import msgspec

from service.settings import ServiceSettings, Settings
from tests.conftest import ROOT, eventually
from worker.settings import WorkerSettings

_START_SECONDS = 30.0
_STOP_SECONDS = 30.0
_COMMAND_SECONDS = 10.0
# What a process may know of the machine. Addresses of servers are not among it: those are its settings.
_INHERITED = ("PATH", "HOME", "LANG", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")


class Process:
    """One process. Its output, of all its lives, goes to one file."""

    def __init__(self, *command: str, environment: Mapping[str, str], port: int, output: Path) -> None:
        self.environment = environment
        self.base_url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", *command]
        self._output = output
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, for the first time or again."""
        with self._output.open("ab") as output:
            self._running = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def terminate(self) -> None:
        """Ask it to end, with SIGTERM."""
        self._send(signal.SIGTERM)

    async def stop(self) -> int:
        """Ask it to end, with SIGTERM, and return its exit status."""
        self.terminate()
        return await self.exit_status()

    def freeze(self) -> None:
        """Stop it where it is, with SIGSTOP."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on, with SIGCONT."""
        self._send(signal.SIGCONT)

    async def kill(self) -> None:
        """End it with SIGKILL, at whatever instruction it is."""
        self._send(signal.SIGKILL)
        await self.exit_status()

    async def exit_status(self) -> int:
        """Wait for its end and return its exit status."""
        running = self._running
        assert running is not None
        await eventually(lambda: running.poll() is not None, seconds=_STOP_SECONDS)
        assert running.returncode is not None
        return running.returncode

    def end(self) -> None:
        """End it by force if it still runs, whatever has happened, and show the end of its output."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()
        print(f"--- {self._output}", self.output[-4000:], sep="\n")  # noqa: T201 - pytest shows it on failure

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._running is not None and self._running.poll() is None

    @property
    def output(self) -> str:
        """All that it has written, in all its lives."""
        return self._output.read_text() if self._output.exists() else ""

    async def status(self, path: str) -> int | None:
        """Return the HTTP status of a GET, or None while nothing answers."""
        async with httpx.AsyncClient(base_url=self.base_url, timeout=10) as client:
            try:
                return (await client.get(path)).status_code
            except httpx.TransportError:
                return None

    async def becomes_ready(self) -> None:
        """Wait until it is ready."""
        await self._answers("/readyz", 200)

    async def becomes_alive_but_not_ready(self) -> None:
        """Wait until it lives, but lacks something that it needs."""
        await self._answers("/livez", 200)
        await self._answers("/readyz", 503)

    async def _answers(self, path: str, status: int) -> None:
        async def answered() -> bool:
            assert self.is_running, f"it has ended: {self.output[-2000:]}"
            return await self.status(path) == status

        await eventually(answered, seconds=_START_SECONDS)

    def _send(self, number: signal.Signals) -> None:
        assert self._running is not None
        self._running.send_signal(number)


def api_process(settings: ServiceSettings, folder: Path, **variables: str) -> Process:
    """Return an API, not yet started, on a port of its own."""
    port = free_port()
    environment = environment_of(settings, PORT=str(port), **variables)
    return Process("service", "serve", environment=environment, port=port, output=folder / f"api-{port}.log")


def worker_process(settings: WorkerSettings, folder: Path, **variables: str) -> Process:
    """Return a worker, not yet started, with its health port of its own."""
    port = free_port()
    environment = environment_of(settings, HEALTH_PORT=str(port), **variables)
    return Process("worker", environment=environment, port=port, output=folder / f"worker-{port}.log")


@asynccontextmanager
async def started(*processes: Process, ready: bool = True) -> AsyncIterator[None]:
    """Run *processes* until the block is left: in order if all went well, and by force if not."""
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
    """What a command that has ended printed, and its exit status."""

    status: int
    output: str
    errors: str


async def run(*command: str, environment: Mapping[str, str]) -> Ended:
    """Run `python -m` *command* to its end."""
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def bare_environment(**variables: str) -> dict[str, str]:
    """Return an environment without any setting of the service but *variables*."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ} | variables


def environment_of(settings: Settings, **variables: str) -> dict[str, str]:
    """Return the environment that says *settings*."""
    values = msgspec.structs.asdict(settings).items()
    said = {name.upper(): str(value) for name, value in values if value is not None}
    return bare_environment(**(said | variables))


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port
