"""The processes under test, each behind its own proxies, so that each can lose its connections alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from deploy.local.errors import LocalStackError
from tests.faults.verdict.records import Freeze, Kill, Record
from tests.harness.processes import Process
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import until

RELAYS = ("relay-1", "relay-2", "relay-3")
NOTIFIERS = ("notifications-1", "notifications-2")
CALCULATORS = ("calculations-1", "calculations-2")
APIS = ("api-1", "api-2")

Make = Callable[[str, str, str], Process]  # with a name, and the URLs of Postgres and of the broker

_READY_SECONDS = 60.0
_EXIT_SECONDS = 30.0
_WATCH_SECONDS = 0.2


class Worker:
    """One process of the service. After a kill it is started again at once."""

    def __init__(
        self, process: Process, record: Record, *, postgres: TcpProxy, broker: TcpProxy | None
    ) -> None:
        self.name = process.name
        self.process = process
        self.postgres = postgres
        self.broker = broker
        self._record = record
        self._expected_gone = False

    @property
    def role(self) -> str:
        """Its name without its number."""
        return self.name.partition("-")[0]

    async def kill(self) -> None:
        """Send SIGKILL, and start it again."""
        self._expected_gone = True
        self._record.kills.append(Kill(self.name, time.monotonic()))
        await self.process.kill()
        self._start_again()

    async def freeze(self, seconds: float) -> None:
        """Send SIGSTOP, and SIGCONT after *seconds*. The process does not notice the time between."""
        began = time.monotonic()
        self.process.freeze()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.process.thaw()
            self._record.freezes.append(Freeze(self.name, began, time.monotonic()))

    async def restart(self) -> None:
        """Send SIGTERM, as a rolling update does, and start it again."""
        await self.end()
        self._start_again()

    async def end(self) -> None:
        """Send SIGTERM, and record an exit that is late or not clean."""
        self._expected_gone = True
        self.process.terminate()
        try:
            status = await self.process.exit_status(seconds=_EXIT_SECONDS)
        except TimeoutError:
            self._record.deaths.append(f"{self.name} ignores SIGTERM for {_EXIT_SECONDS:.0f} s")
            self._record.kills.append(Kill(self.name, time.monotonic()))
            await self.process.kill()
        else:
            if status != 0:
                self._record.deaths.append(f"after SIGTERM: {self.process.running.trouble()}")

    async def watch(self) -> None:
        """Record each death that no fault caused, and start the process again, until cancelled."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            trouble = self.process.running.trouble()
            if trouble is not None and not self._expected_gone:
                self._record.deaths.append(trouble)
                self.process.start()

    async def becomes_ready(self) -> None:
        """Wait until it is ready, for at most a minute: it may die meanwhile, and `watch` starts it again."""

        async def is_ready() -> bool:
            with suppress(LocalStackError):
                await self.process.becomes_ready(seconds=_READY_SECONDS)
                return True
            return False

        await until(is_ready, seconds=_READY_SECONDS, pause_seconds=0.1)

    def _start_again(self) -> None:
        self.process.start()
        self._expected_gone = False


@asynccontextmanager
async def started(
    make: Make, record: Record, *, database_url: str, amqp_url: str
) -> AsyncIterator[list[Worker]]:
    """Run every process, behind proxies, until the block is left."""
    async with AsyncExitStack() as proxies, AsyncExitStack() as processes:
        workers: list[Worker] = []
        processes.push_async_callback(_stop_all, workers)
        for name in (*APIS, *RELAYS, *NOTIFIERS, *CALCULATORS):
            postgres = await proxies.enter_async_context(TcpProxy(database_url, name=name))
            broker = None
            if name not in APIS:
                broker = await proxies.enter_async_context(TcpProxy(amqp_url, name=name))
            process = make(name, postgres.url, broker.url if broker else "")
            process.start()
            workers.append(Worker(process, record, postgres=postgres, broker=broker))
        await asyncio.gather(*(worker.becomes_ready() for worker in workers))
        yield workers


async def _stop_all(workers: Sequence[Worker]) -> None:
    await asyncio.gather(*(asyncio.to_thread(worker.process.running.stop) for worker in workers))
