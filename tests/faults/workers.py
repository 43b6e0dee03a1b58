"""The processes under test, each behind proxies of its own, so that each can lose its own connections."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import Process, Program
from tests.faults.proxy import Proxy
from tests.faults.records import Freeze, Kill, Record
from tests.faults.waiting import until

RELAYS = ("relay-1", "relay-2", "relay-3")
NOTIFIERS = ("notifications-1", "notifications-2")
CALCULATORS = ("calculations-1", "calculations-2")
APIS = ("api-1", "api-2")

_INHERITED = ("PATH", "HOME", "LANG")
_READY_SECONDS = 60.0
_EXIT_SECONDS = 30.0
_GONE_SECONDS = 10.0
_WATCH_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process: what it runs, and what it is told beside its ports and addresses."""

    name: str
    arguments: Sequence[str]  # of Python
    environment: Mapping[str, str]
    port_variable: str


class Worker:
    """One of our processes, which can be killed, and is then started again at once."""

    def __init__(
        self, command: Command, record: Record, folder: Path, *, postgres: Proxy, broker: Proxy | None
    ) -> None:
        self.name = command.name
        self.postgres = postgres
        self.broker = broker
        self.port = free_port()
        self._record = record
        self._expected_gone = False
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        addresses = {"DATABASE_URL": postgres.url, command.port_variable: str(self.port)}
        if broker is not None:
            addresses["AMQP_URL"] = broker.url
        self._process = Process(
            Program(
                name=command.name,
                command=[sys.executable, *command.arguments],
                environment={**inherited, **command.environment, **addresses},
                folder=CHECKOUT,
                log=folder / f"{command.name}.log",
                pid_file=folder / f"{command.name}.pid",
            )
        )

    @property
    def role(self) -> str:
        """What it does: its name without its number."""
        return self.name.partition("-")[0]

    @property
    def log(self) -> Path:
        """What it has written, in all its lives."""
        return self._process.program.log

    async def kill(self) -> None:
        """End it with SIGKILL, at whatever instruction it is, and start it again."""
        self._expected_gone = True
        self._record.kills.append(Kill(self.name, time.monotonic()))
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        await self._gone(_GONE_SECONDS)
        self._process.restart()
        self._expected_gone = False

    async def freeze(self, seconds: float) -> None:
        """Stop it where it is (SIGSTOP), and let it go on after *seconds*: to itself no time has passed."""
        began = time.monotonic()
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(self._process.pid, signal.SIGCONT)
            self._record.freezes.append(Freeze(self.name, began, time.monotonic()))

    async def restart(self) -> None:
        """End it with SIGTERM, as a rolling update does, and start it again."""
        await self.end()
        self._process.restart()
        self._expected_gone = False

    async def end(self) -> None:
        """End it with SIGTERM, and write down if it does not exit in order."""
        self._expected_gone = True
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        try:
            how = await self._gone(_EXIT_SECONDS)
        except TimeoutError:
            self._record.deaths.append(f"{self.name} ignores SIGTERM for {_EXIT_SECONDS:.0f} s")
            self._record.kills.append(Kill(self.name, time.monotonic()))
            os.kill(self._process.pid, signal.SIGKILL)
            await self._gone(_GONE_SECONDS)
        else:
            if not how.endswith("exited with status 0."):
                self._record.deaths.append(f"after SIGTERM: {how}")

    async def watch(self) -> None:
        """Write down a death that nobody has asked for, and start the process again, until cancelled."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            trouble = self._process.trouble()
            if trouble is not None and not self._expected_gone:
                self._record.deaths.append(trouble)
                self._process.restart()

    async def becomes_ready(self) -> None:
        """Wait until it says that it is ready."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=5.0) as client:
            await until(lambda: _is_ready(client), seconds=_READY_SECONDS, pause_seconds=0.1)

    def stop(self) -> None:
        """End it, in order or by force."""
        self._process.stop()

    async def _gone(self, seconds: float) -> str:
        await until(lambda: self._process.trouble() is not None, seconds=seconds, pause_seconds=0.005)
        trouble = self._process.trouble()
        if trouble is None:
            raise TimeoutError
        return trouble


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).is_success
    except httpx.TransportError:
        return False


@asynccontextmanager
async def started(
    commands: Sequence[Command], record: Record, folder: Path, *, database_url: str, amqp_url: str
) -> AsyncIterator[list[Worker]]:
    """Run every command, each behind its own proxies, until the block is left."""
    async with AsyncExitStack() as proxies, AsyncExitStack() as processes:
        workers: list[Worker] = []
        processes.push_async_callback(_stop_all, workers)
        for command in commands:
            postgres = await proxies.enter_async_context(Proxy(command.name, database_url))
            broker = None
            if command.name not in APIS:
                broker = await proxies.enter_async_context(Proxy(command.name, amqp_url))
            workers.append(Worker(command, record, folder, postgres=postgres, broker=broker))
        await asyncio.gather(*(worker.becomes_ready() for worker in workers))
        yield workers


async def _stop_all(workers: Sequence[Worker]) -> None:
    await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in workers))
