"""The test stand: private servers, a database for each side, processes and peers."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import asyncpg
import msgspec

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT, Place, Report, working_folder
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import run_command
from service.postgres.pool import Connection
from tests.benchmarks.comparison import Bar, Comparison, Measure, compare
from tests.harness import databases, queues
from tests.harness.examples import CONVEYANCER, SECRET_KEYS
from tests.harness.issuer import AUDIENCE, ISSUER, Issuer
from tests.harness.processes import Process, bare_environment
from tests.harness.servers import Servers, private_servers

LOCAL = CHECKOUT / ".local" / "benchmarks"
PEERS_PYTHON = CHECKOUT / ".local" / "peers" / "bin" / "python"

POOL_SIZE = 10  # connections to Postgres, of the product and of the peers
_READY_SECONDS = 30.0
_TOKEN_SECONDS = 24 * 3600


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how large the measurements are."""

    rounds: int
    seconds: int  # of load on the API, for each side and round
    events: int  # pending when a relay starts
    relay_seconds: float  # after which a relay is stopped
    rows: Sequence[int]  # stored, in ascending order
    chain_seconds: float = 60.0  # of load on the whole chain


class Tree(msgspec.Struct, frozen=True):
    """The programs that are measured: a checkout of the product, and the Python with its packages."""

    checkout: Path = CHECKOUT
    python: str = sys.executable

    def command(self, *arguments: str) -> list[str]:
        """Return the command `python -m` *arguments*."""
        return [self.python, "-m", *arguments]


class Stand:
    """The servers, and what can be started on them."""

    def __init__(self, folder: Path, servers: Servers, sizes: Sizes, tree: Tree) -> None:
        self.folder = folder
        self.sizes = sizes
        self._tree = tree
        self.amqp_url = servers.broker.url
        self._servers = servers
        self._issuer = Issuer(folder)
        self.token = self._issuer.token(exp=int(time.time()) + _TOKEN_SECONDS)
        self._databases: dict[str, str] = {}

    async def database(self, name: str, *, with_schema: bool = True) -> str:
        """Return the URL of a database, which the first call creates."""
        if name not in self._databases:
            async with self.connected(self._servers.postgres.url) as administrator:
                await databases.create(administrator, name)
            url = databases.url_of(self._servers.postgres.url, name)
            if with_schema:
                await self._prepare(url)
            self._databases[name] = url
        return self._databases[name]

    async def _prepare(self, database_url: str) -> None:
        for arguments in (
            ("schema", "apply"),
            ("conveyancer", "add", CONVEYANCER, "--name", "Acme", "--charges-calculation-fee"),
        ):
            command = self._tree.command("service", *arguments)
            await self._run(" ".join(arguments[:2]), command, DATABASE_URL=database_url)

    @asynccontextmanager
    async def connected(self, url: str) -> AsyncIterator[Connection]:
        """Yield a connection to Postgres."""
        connection = await asyncpg.connect(url, timeout=10.0, command_timeout=600.0)
        try:
            yield connection
        finally:
            await connection.close()

    async def settle(self) -> None:
        """Have Postgres write a checkpoint, and pause."""
        async with self.connected(self._servers.postgres.url) as connection:
            await connection.execute("CHECKPOINT")
        await asyncio.sleep(0.2)

    async def compare(self, name: str, sides: Mapping[str, Measure], bars: Sequence[Bar] = ()) -> Comparison:
        """Measure all *sides* in turn, as many rounds as are wanted."""
        return await compare(name, sides, bars, rounds=self.sizes.rounds, settle=self.settle)

    @asynccontextmanager
    async def api(self, database_url: str) -> AsyncIterator[Process]:
        """Run one API process, with its default logs."""
        port = free_port()
        environment = {
            "DATABASE_URL": database_url,
            "APP_URL": "https://app.example.com",
            "REQUEST_SECRET_KEYS": SECRET_KEYS,
            "DATABASE_POOL_SIZE": str(POOL_SIZE),
            "DATABASE_TIMEOUT_SECONDS": "5",
            "PORT": str(port),
            **self.auth_settings,
        }
        command = self._tree.command("service", "serve")
        async with self._running("api", command, environment, port) as api:
            await api.becomes_ready()
            yield api

    @asynccontextmanager
    async def worker(
        self,
        database_url: str,
        *roles: str,
        smtp_url: str = "smtp://127.0.0.1:9",
        ready: bool = True,
        **settings: str,
    ) -> AsyncIterator[Process]:
        """Run one worker process."""
        port = free_port()
        environment = {
            "DATABASE_URL": database_url,
            "AMQP_URL": self.amqp_url,
            "APP_URL": "https://app.example.com",
            "REQUEST_SECRET_KEYS": SECRET_KEYS,
            "SMTP_URL": smtp_url,
            "MAIL_FROM": "calculations@service.example.com",
            "HEALTH_PORT": str(port),
            **settings,
        }
        command = self._tree.command("worker", *roles)
        async with self._running("worker", command, environment, port) as worker:
            if ready:
                await worker.becomes_ready()
            yield worker

    @asynccontextmanager
    async def peer(
        self, script: str, *arguments: str, ready: bool = False, **variables: str
    ) -> AsyncIterator[Process]:
        """Run a program of tests/benchmarks/peers, in the environment with its packages."""
        port = free_port()
        environment = {"AMQP_URL": self.amqp_url, "PORT": str(port), **self.auth_settings, **variables}
        async with self._running(script, _peer(script, arguments), environment, port) as peer:
            if ready:
                await peer.becomes_ready()
            yield peer

    async def run_peer(self, script: str, *arguments: str, **variables: str) -> None:
        """Run a program of tests/benchmarks/peers to its end."""
        await self._run(script, _peer(script, arguments), AMQP_URL=self.amqp_url, **variables)

    async def _run(self, name: str, command: Sequence[str], **variables: str) -> None:
        await asyncio.to_thread(
            run_command,
            name,
            command,
            environment=bare_environment(**variables),
            folder=self._tree.checkout,
            seconds=_READY_SECONDS,
        )

    @property
    def auth_settings(self) -> Mapping[str, str]:
        """The settings that verify access tokens."""
        return {
            "AUTH_ISSUER": ISSUER,
            "AUTH_AUDIENCE": AUDIENCE,
            "AUTH_JWKS_URL": self._issuer.jwks.as_uri(),
        }

    @asynccontextmanager
    async def _running(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
    ) -> AsyncIterator[Process]:
        process = Process(
            name,
            command,
            environment=bare_environment(**environment),
            port=port,
            folder=self.folder,
            checkout=self._tree.checkout,
        )
        process.start()
        try:
            yield process
            process.check()
        except LocalStackError as error:
            raise LocalStackError(f"{error} The end of {process.log}:\n{process.output[-1000:]}") from None
        finally:
            await asyncio.to_thread(process.running.stop)


def _peer(script: str, arguments: Sequence[str]) -> list[str]:
    return [str(PEERS_PYTHON), str(Path(__file__).parent / "peers" / f"{script}.py"), *arguments]


def ensure_peers() -> None:
    """Raise LocalStackError if the packages of the peers are missing."""
    if not PEERS_PYTHON.exists():
        raise LocalStackError("The peers are not installed: use `make bench`.")


@asynccontextmanager
async def stand(
    sizes: Sizes, report: Report, *, name: str = "run", tree: Tree | None = None
) -> AsyncIterator[Stand]:
    """Start servers for one tree, by default this one. Their data is thrown away, but written with fsync.

    The workers of another tree declare their own topology on RabbitMQ.
    """
    with ExitStack() as stack:
        place = Place(folder=LOCAL, keep=False, report=report)
        folder = stack.enter_context(working_folder(place, name))
        servers = stack.enter_context(private_servers(Place(folder=folder, keep=True, report=report)))
        if tree is None:
            async with queues.open_channel(servers.broker.url) as channel:
                await queues.declare_topology(channel)
        yield Stand(folder, servers, sizes, tree or Tree())
