"""The test stand: private servers, a database for each side, processes and peers."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path

import httpx

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT, Place, working_folder
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import run_command
from tests.benchmarks.comparison import Bar, Comparison, Figures, Measure
from tests.benchmarks.processor_time import Meter
from tests.harness import databases, queues
from tests.harness.issuer import Issuer, api_settings
from tests.harness.processes import Process, bare_environment, environment_of, python
from tests.harness.servers import Servers, private_servers

LOCAL = CHECKOUT / ".local" / "benchmarks"
PEERS_PYTHON = CHECKOUT / ".local" / "peers" / "bin" / "python"

POOL_SIZE = 10  # connections to Postgres, of the product and of the peers


class Stand:
    """The servers, and what can be started on them."""

    def __init__(self, folder: Path, servers: Servers, *, rounds: int, seconds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.seconds = seconds  # of load on the API, for each side and round
        self.amqp_url = servers.broker.url
        self._postgres_url = servers.postgres.url
        self._postgres_pid = servers.postgres.process.pid
        issuer = Issuer(folder)
        self.token = issuer.token(exp=int(time.time()) + 24 * 3600)
        usual = environment_of(api_settings("", issuer), DATABASE_POOL_SIZE=str(POOL_SIZE))
        self._settings = usual | {
            "AMQP_URL": servers.broker.url,
            "MAIL_FROM": "calculations@service.example.com",
        }
        self._databases: dict[str, str] = {}

    async def database(self, name: str, *, with_schema: bool = True) -> str:
        """Return the URL of a database, which the first call makes."""
        if name not in self._databases:
            async with databases.connected(self._postgres_url) as administrator:
                await databases.create(administrator, name)
            url = databases.url_of(self._postgres_url, name)
            if with_schema:
                async with databases.connected(url) as connection:
                    await databases.prepare(connection)
            self._databases[name] = url
        return self._databases[name]

    async def settle(self) -> None:
        """Have Postgres write a checkpoint, and pause."""
        async with databases.connected(self._postgres_url) as connection:
            await connection.execute("CHECKPOINT")
        await asyncio.sleep(0.2)

    def meter(self, side: Process) -> Meter:
        """Return a meter of the processor time of a side and of Postgres."""
        return Meter(side.running.pid, self._postgres_pid)

    def client(self, api: Process) -> httpx.AsyncClient:
        """Return a client of an API that sends JSON with a token."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        return httpx.AsyncClient(base_url=api.base_url, headers=headers, timeout=10.0)

    async def run(
        self, name: str, command: Sequence[str | Path], *, seconds: float = 30.0, **variables: str
    ) -> str:
        """Run a command to its end, and return its output. Raises LocalStackError."""
        return await asyncio.to_thread(
            run_command,
            name,
            command,
            environment=bare_environment(**(self._settings | variables)),
            folder=CHECKOUT,
            seconds=seconds,
        )

    def api(self, database_url: str) -> AbstractAsyncContextManager[Process]:
        settings = {"DATABASE_URL": database_url, "DATABASE_TIMEOUT_SECONDS": "5"}
        return self._running("api", python("service", "serve"), settings, probes_port=free_port())

    def worker(
        self,
        database_url: str,
        *roles: str,
        smtp_url: str = "smtp://127.0.0.1:9",
        ready: bool = True,
        **settings: str,
    ) -> AbstractAsyncContextManager[Process]:
        settings |= {"DATABASE_URL": database_url, "SMTP_URL": smtp_url}
        return self._running("worker", python("worker", *roles), settings, ready=ready)

    def peer(
        self, script: str, *arguments: str, ready: bool = False, **settings: str
    ) -> AbstractAsyncContextManager[Process]:
        """Run a program of tests/benchmarks/peers, in the environment with its packages."""
        return self._running(script, peer_command(script, *arguments), settings, ready=ready)

    @asynccontextmanager
    async def _running(
        self,
        name: str,
        command: Sequence[str],
        settings: dict[str, str],
        *,
        probes_port: int | None = None,
        ready: bool = True,
    ) -> AsyncIterator[Process]:
        port = free_port()
        ports = {"PORT": str(port), "HEALTH_PORT": str(probes_port or port)}
        process = Process(
            name,
            command,
            environment=bare_environment(**(self._settings | ports | settings)),
            port=port,
            probes_port=probes_port,
            folder=self.folder,
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


def peer_command(script: str, *arguments: str) -> list[str]:
    return [str(PEERS_PYTHON), str(Path(__file__).parent / "peers" / f"{script}.py"), *arguments]


async def compare(name: str, sides: Mapping[str, Measure], bars: Sequence[Bar], stand: Stand) -> Comparison:
    """Measure all *sides* in turn, round after round, so that other load on the machine affects all alike.

    Every second round is in reverse order, and the stand settles before each side, so that no side gains or
    loses by the one before it.
    """
    rounds: dict[str, list[Figures]] = {side: [] for side in sides}
    for number in range(stand.rounds):
        for side, measure in list(sides.items())[:: -1 if number % 2 else 1]:
            await stand.settle()
            rounds[side].append(await measure())
    return Comparison(name, bars, rounds)


@asynccontextmanager
async def open_stand(*, rounds: int, seconds: int) -> AsyncIterator[Stand]:
    """Start the servers. Their data is thrown away, but written with fsync."""
    with ExitStack() as stack:
        place = Place(folder=LOCAL)
        folder = stack.enter_context(working_folder(place, "run"))
        servers = stack.enter_context(private_servers(Place(folder=folder, keep=True)))
        async with queues.open_channel(servers.broker.url) as channel:
            await queues.declare_topology(channel)
        yield Stand(folder, servers, rounds=rounds, seconds=seconds)
