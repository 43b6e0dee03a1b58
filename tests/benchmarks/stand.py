"""The test stand: private servers, a database for each side, processes and peers, and what they cost."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT, Place, working_folder
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import run_command
from tests.harness import databases, queues
from tests.harness.examples import A_REQUEST
from tests.harness.issuer import Issuer, api_settings
from tests.harness.processes import Process, environment_of, python
from tests.harness.servers import Servers, children, private_servers
from tests.harness.waiting import until

PEERS_PYTHON = CHECKOUT / ".local" / "peers" / "bin" / "python"
POOL_SIZE = 10  # connections to Postgres, of the product and of the peers
EACH, IN_POSTGRES = "µs of processor time each", "µs of these in Postgres"
PER_SECOND = "per second"

Figures = Mapping[str, float]  # by name and unit, such as PER_SECOND

# A request of realistic size.
BODY: dict[str, Any] = A_REQUEST | {
    "customer_phone": "+44 20 7946 0000",
    "property_value": 300_000,
    "external_id": "case-1234567",
    "meta_data": {"source": "crm", "campaign_id": 7},
}
COLUMNS = BODY | {"meta_data": msgspec.json.encode(BODY["meta_data"]).decode()}

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for a figure of *side*: absolute, or as a ratio to the same figure of another side."""

    side: str
    of: str | None = None
    figure: str = EACH
    kind: Literal["at least", "at most"] = "at least"
    limit: float

    def value(self, rounds: Mapping[str, Sequence[Figures]]) -> float:
        """Return the value that is limited. A ratio is the median of the ratios of all rounds."""
        ours = [figures[self.figure] for figures in rounds[self.side]]
        theirs = [figures[self.figure] for figures in rounds[self.of]] if self.of else [1.0] * len(ours)
        return median(one / other for one, other in zip(ours, theirs, strict=True))


class Stand:
    """The servers, and what can be started and measured on them."""

    def __init__(self, folder: Path, servers: Servers, *, rounds: int, seconds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.seconds = seconds  # of load on the API, for each side and round
        self.amqp_url = servers.broker.url
        self._postgres = servers.postgres
        issuer = Issuer(folder)
        self.token = issuer.token(exp=int(time.time()) + 24 * 3600)
        self._settings = environment_of(
            api_settings("", issuer),
            AMQP_URL=self.amqp_url,
            DATABASE_POOL_SIZE=str(POOL_SIZE),
            DATABASE_TIMEOUT_SECONDS="5",
            MAIL_FROM="calculations@service.example.com",
            SMTP_URL="smtp://127.0.0.1:9",
        )
        self._databases: dict[str, str] = {}

    async def database(self, name: str, *, with_schema: bool = True) -> str:
        """Return the URL of a database, which the first call makes."""
        if name not in self._databases:
            async with databases.connected(self._postgres.url) as administrator:
                await databases.create(administrator, name)
            self._databases[name] = databases.url_of(self._postgres.url, name)
            if with_schema:
                async with databases.connected(self._databases[name]) as connection:
                    await databases.prepare(connection)
        return self._databases[name]

    async def run(self, name: str, command: Sequence[str], *, seconds: float = 30.0, **variables: str) -> str:
        """Run a command to its end, and return its output. Raises LocalStackError."""
        environment = self._settings | variables
        return await asyncio.to_thread(
            run_command, name, command, environment=environment, folder=CHECKOUT, seconds=seconds
        )

    def api(self, url: str) -> AbstractAsyncContextManager[Process]:
        return self.running("api", python("service", "serve"), url, probes_port=free_port())

    def worker(
        self, url: str, *roles: str, ready: bool = False, settings: Mapping[str, str] = {}
    ) -> AbstractAsyncContextManager[Process]:
        return self.running("worker", python("worker", *roles), url, ready=ready, settings=settings)

    @asynccontextmanager
    async def running(
        self,
        name: str,
        command: Sequence[str],
        database_url: str,
        *,
        probes_port: int | None = None,
        ready: bool = True,
        settings: Mapping[str, str] = {},
    ) -> AsyncIterator[Process]:
        """Run a process of the product or a peer on a database."""
        port = free_port()
        own = {"DATABASE_URL": database_url, "PORT": str(port), "HEALTH_PORT": str(probes_port or port)}
        environment = {**self._settings, **own, **settings}
        process = Process(
            name, command, environment=environment, port=port, probes_port=probes_port, folder=self.folder
        )
        process.start()
        try:
            if ready:
                await process.becomes_ready()
            yield process
            process.check()
        except LocalStackError as error:
            raise LocalStackError(f"{error} The end of {process.log}:\n{process.output[-1000:]}") from None
        finally:
            await asyncio.to_thread(process.running.stop)

    def meter(self, side: Process) -> Callable[[int], Figures]:
        """Return a function that returns the processor time of each item, of so many done since now."""
        pids = (side.running.pid, self._postgres.process.pid)
        before = [_processor_seconds(pid) for pid in pids]

        def costs(items: int) -> Figures:
            used = [_processor_seconds(pid) - since for pid, since in zip(pids, before, strict=True)]
            return {EACH: sum(used) / items * 1e6, IN_POSTGRES: used[1] / items * 1e6}

        return costs

    async def rate_of(
        self, side: Process, done: Callable[[], Awaitable[int]], every: int, *, seconds: float = 8.0
    ) -> Figures:
        """Return how many a second are *done*, from the first ones until *every* one is, or time is up."""

        async def is_complete() -> bool:
            return await done() >= every

        if not await until(done, seconds=30.0, pause_seconds=0.02):
            raise LocalStackError("Nothing is done.")
        first, began, costs = await done(), time.monotonic(), self.meter(side)
        await until(is_complete, seconds=seconds, pause_seconds=0.02)
        items = await done() - first
        return {PER_SECOND: items / (time.monotonic() - began), **costs(items)}

    async def compare(
        self, name: str, sides: Mapping[str, Callable[[], Awaitable[Figures]]], bars: Sequence[Bar]
    ) -> bool:
        """Measure all *sides* in turn, print the medians of all rounds, and return whether all bars are met.

        Other load on the machine affects all alike. Every second round is in reverse order, and Postgres
        writes a checkpoint before each side, so that none gains or loses by the one before it.
        """
        rounds: dict[str, list[Figures]] = {side: [] for side in sides}
        for number in range(self.rounds):
            for side, measure in list(sides.items())[:: -1 if number % 2 else 1]:
                async with databases.connected(self._postgres.url) as connection:
                    await connection.execute("CHECKPOINT")
                await asyncio.sleep(0.2)
                rounds[side].append(await measure())
        print(f"\n{name}")
        for side, of_side in rounds.items():
            for figure in of_side[0]:
                print(f"  {side:32}{_number(median(each[figure] for each in of_side)):>8} {figure}")
        are_met = []
        for bar in bars:
            what, value = f"{bar.side} / {bar.of}" if bar.of else bar.side, bar.value(rounds)
            are_met.append(value >= bar.limit if bar.kind == "at least" else value <= bar.limit)
            outcome = "met" if are_met[-1] else "MISSED"
            print(f"  {what}, {bar.figure}: {_number(value)}, {bar.kind} {bar.limit:g}: {outcome}")
        return all(are_met)


def _number(value: float) -> str:
    """Return a figure with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _processor_seconds(pid: int) -> float:
    """Return the processor time of a process and its children. It varies less than a rate."""
    ticks = 0
    for each in (*children(pid), pid):  # A child that ends meanwhile counts with its parent, which is last.
        with suppress(FileNotFoundError, ProcessLookupError):
            ticks += sum(map(int, Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS_PER_SECOND


def peer_command(script: str, *arguments: str) -> list[str]:
    """Return the command of a program of tests/benchmarks/peers, in the environment with its packages."""
    return [str(PEERS_PYTHON), str(Path(__file__).parent / "peers" / f"{script}.py"), *arguments]


@asynccontextmanager
async def open_stand(*, rounds: int, seconds: int) -> AsyncIterator[Stand]:
    """Start the servers. Their data is thrown away, but written with fsync."""
    with ExitStack() as stack:
        place = Place(folder=CHECKOUT / ".local" / "benchmarks")
        folder = stack.enter_context(working_folder(place, "run"))
        servers = stack.enter_context(private_servers(Place(folder=folder, keep=True)))
        async with queues.open_channel(servers.broker.url) as channel:
            await queues.declare_topology(channel)
        yield Stand(folder, servers, rounds=rounds, seconds=seconds)
