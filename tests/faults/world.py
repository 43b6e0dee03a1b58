"""What a fault is, and everything that it can change: servers, processes, other teams, and the load."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Place, Report
from deploy.local.machine.ports import accepts, free_port
from service.postgres import outages
from service.postgres.pool import Connection, open_pool
from service.server.background import in_background
from service.settings import Settings
from tests.faults import others
from tests.faults.records import Record, Span
from tests.harness import databases, programs, queues
from tests.harness.http import bearer
from tests.harness.issuer import AUDIENCE, ISSUER, Issuer
from tests.harness.processes import Process, email_settings, environment_of, python, run_process
from tests.harness.rabbitmq_cluster import Cluster, three_nodes
from tests.harness.servers import Servers, scratch_folder
from tests.harness.standby import Replicated, replicated
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import until
from worker.process import ROLES

Result = TypeVar("Result")

CLOCKS = "clocks"  # touched by faults that need libfaketime
_NAMES = ("relay-3", *(f"{role}-{number}" for role in ("api", *ROLES) for number in (1, 2)))
HARNESS = "harness"  # application_name of the connections that no fault terminates
RETENTION_DAYS = 30  # so that a wrong clock could let a relay erase requests
_TOKEN_SECONDS = 100 * 24 * 3600  # longer than a fault sets a clock ahead
_TRY_SECONDS = 60.0


@dataclass(frozen=True)
class ClusteredServers(Servers):
    """All of them. `postgres` and `broker` are one of each; clients find the nodes in turn."""

    nodes: Cluster
    pair: Replicated
    to_postgres: TcpProxy


@asynccontextmanager
async def clustered_servers(report: Report) -> AsyncIterator[ClusteredServers]:
    """Start three nodes of RabbitMQ and a pair of Postgres, each behind one address, as in Kubernetes."""
    with scratch_folder() as folder, three_nodes(Place(folder=folder, report=report)) as nodes:
        async with (
            replicated() as pair,
            TcpProxy(pair.primary_url) as to_postgres,
            TcpProxy(nodes.nodes[0].url) as to_broker,
        ):
            to_broker.lead_to(*(node.url for node in nodes.nodes))
            urls = to_postgres.url, to_broker.url
            yield ClusteredServers(pair.primary, nodes.nodes[0], *urls, nodes, pair, to_postgres)


class Worker(Process):
    """One process of the service. After a kill it is started again at once."""

    def __init__(
        self, name: str, servers: Servers, record: Record, folder: Path, settings: Mapping[str, str]
    ) -> None:
        self.role = name.partition("-")[0]
        self.postgres = TcpProxy(servers.postgres_url, name=name)
        self.broker = TcpProxy(servers.broker_url, name=name)
        self._record = record
        self._expected_gone = False
        is_api, probes_port = self.role == "api", free_port()
        port = free_port() if is_api else probes_port
        command = ["service", "serve"] if is_api else ["worker", self.role]
        if record.plan.broken:
            command = ["tests.faults.broken_programs", record.plan.broken, *command]
        self._environment = {
            **settings,
            "DATABASE_URL": databases.as_role(self.postgres.url, "api" if is_api else "worker"),
            "AMQP_URL": self.broker.url,
            "PORT": str(port),
            "HEALTH_PORT": str(probes_port),
            "SMTP_HELO_NAME": name,
        }
        ports = {"port": port, "probes_port": probes_port}
        super().__init__(name, python(*command), environment=self._environment, **ports, folder=folder)

    async def kill(self) -> int:
        """Send SIGKILL, and start it again. Returns the exit status."""
        self._expected_gone = True
        self._record.kills.append((self.name, time.monotonic()))
        status = await super().kill()
        self.start()
        self._expected_gone = False
        return status

    async def freeze_for(self, seconds: float) -> bool:
        """Send SIGSTOP, and SIGCONT after *seconds*. Returns whether the process had stopped."""
        began = time.monotonic()
        self.freeze()
        try:
            await asyncio.sleep(seconds)
            return self.status("State:") == "T"
        finally:
            self.thaw()
            self._record.freezes.append(Span(self.name, began, time.monotonic()))

    async def restart(self, *, clock_off_by: int = 0) -> None:
        """Send SIGTERM, as a rolling update does, and start it again, perhaps with a clock wrong by days."""
        await self.leave()
        clock = programs.variables_of_clock(clock_off_by) if clock_off_by else {}
        environment = {**self._environment, **clock}
        self.running.program = replace(self.running.program, environment=environment)
        self.start()
        self._expected_gone = False

    @property
    def has_other_clock(self) -> bool:
        """Whether the process has loaded libfaketime."""
        return "libfaketime" in Path(f"/proc/{self.running.pid}/maps").read_text()

    async def leave(self) -> None:
        """Send SIGTERM, and record an exit that is late or not clean."""
        self._expected_gone = True
        clean = {0} if accepts(self.probes_port) else {0, 128 + signal.SIGTERM}  # while it starts
        self.terminate()
        try:
            if await self.exit_status(seconds=30.0) not in clean:
                self._record.exceptions.append(f"after SIGTERM: {self.running.trouble()}")
        except TimeoutError as error:
            self._record.exceptions.append(f"after SIGTERM: {error}")
            await super().kill()

    async def watch(self) -> None:
        """Record each death that no fault caused, and start the process again, until cancelled."""
        while True:
            await asyncio.sleep(0.2)
            trouble = self.running.trouble()
            if trouble is not None and not self._expected_gone:
                self._record.exceptions.append(trouble)
                self.start()

    async def may_become_ready(self) -> None:
        """Wait until it is ready, for at most a minute. If it dies meanwhile, `watch` records that."""
        with suppress(LocalStackError):
            await self.becomes_ready()


@dataclass(frozen=True)
class World:
    """The servers, the service's processes, and the record of the run."""

    servers: Servers
    workers: Sequence[Worker]
    mail: others.MailServer
    callers: others.Callers
    issuer: Issuer
    record: Record
    chance: random.Random

    @property
    def cluster(self) -> ClusteredServers:
        """The servers, of a run with --cluster."""
        assert isinstance(self.servers, ClusteredServers)
        return self.servers

    def of_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]

    def one_of(self, role: str) -> Worker:
        return self.chance.choice(self.of_role(role))

    @property
    def broker_links(self) -> list[TcpProxy]:
        return [worker.broker for worker in self.workers if worker.role != "api"]

    def some_seconds(self, longest: float = 3.0) -> float:
        """Return how long a fault lasts."""
        return self.chance.uniform(0.2, longest)

    def stall_seconds(self) -> float:
        """Return how long a stall lasts: mostly short, at times longer than heartbeats and timeouts."""
        if self.chance.random() < 0.2:
            return self.chance.uniform(3.0, self.record.plan.longest_stall)
        return self.some_seconds()

    async def is_named(self, process: Worker, by_probe: str, by_doctor: str) -> bool:
        """Return whether both name in time what is wrong at this moment. Record it if they do not."""
        said = ["", ""]
        doctor = ("service" if process.role == "api" else "worker", "doctor")

        async def are_right() -> bool:
            async with httpx.AsyncClient(timeout=10.0) as client:
                said[0] = (await client.get(f"{process.probes_url}/readyz")).text
            environment = process.running.program.environment
            said[1] = (await run_process(*doctor, environment=environment)).output
            return by_probe in said[0] and by_doctor in said[1]

        is_named = await until(are_right, seconds=_TRY_SECONDS)
        if not is_named:
            self.record.unnamed.append(f"{process.name} says {said[0]}, and doctor: {said[1]}")
        return is_named

    async def on_postgres(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Run *work* on a connection that only the death of Postgres ends, and again after that."""
        options = {"timeout": 5.0, "command_timeout": 30.0, "server_settings": {"application_name": HARNESS}}
        deadline = time.monotonic() + _TRY_SECONDS
        while True:
            try:
                async with databases.connected(_writable(self.servers), **options) as connection:
                    return await work(connection)
            except outages.OUTAGE_ERRORS:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)


Injection = Callable[[World], Awaitable[bool]]


class Fault(msgspec.Struct, frozen=True):
    """An injection, and what it touches: faults that touch the same thing are never mixed."""

    name: str
    inject: Injection
    touches: frozenset[str]
    repeats_events: bool  # it may come between a confirm and its settling

    async def happen(self, world: World, delay: float = 0.0) -> None:
        """Inject it after a delay, and record from when until when, and whether its effect was seen."""
        await asyncio.sleep(delay)
        began = time.monotonic()
        is_seen = await self.inject(world)
        world.record.spans.append(Span(self.name, began, time.monotonic(), self.repeats_events, is_seen))


FAULTS: list[Fault] = []
CLUSTER_FAULTS: list[Fault] = []  # of a cluster of RabbitMQ and a pair of Postgres


def fault(
    name: str, *touches: str, repeats: bool = False, among: list[Fault] = FAULTS
) -> Callable[[Injection], Injection]:
    """Add the decorated function to a list. It returns when the fault has ended, however it ends.

    It returns whether its effect was seen. An injection without an effect does not count.

    *repeats*: the fault may keep a confirmed event from being settled, so the event may come again. Every
    choice is made with `world.chance`, so that a seed repeats it.
    """

    def register(inject: Injection) -> Injection:
        among.append(Fault(name, inject, frozenset(touches), repeats))
        return inject

    return register


@asynccontextmanager
async def started(
    servers: Servers, record: Record, folder: Path, chance: random.Random
) -> AsyncIterator[World]:
    """Apply the schema, and start the other teams, the mail server and the service's processes."""
    async with databases.connected(servers.postgres_url) as connection:
        await databases.prepare(connection)
    async with queues.open_channel(servers.broker_url) as channel:
        await others.declare(channel)
    issuer = Issuer(folder)
    async with AsyncExitStack() as stack:
        mail = await stack.enter_async_context(others.MailServer(record, chance))
        settings = environment_of(
            email_settings(
                smtp_url=mail.url,
                retention_days=RETENTION_DAYS,
                email_claim_seconds=record.plan.email_claim_seconds,
                email_retry_seconds=0.1,  # By default the longest pauses would outlast the run.
            ),
            AUTH_ISSUER=ISSUER,
            AUTH_AUDIENCE=AUDIENCE,
            AUTH_JWKS_URL=issuer.jwks.as_uri(),
        )
        running = [Worker(name, servers, record, folder, settings) for name in _NAMES]
        for worker in running:
            await stack.enter_async_context(worker.postgres)
            await stack.enter_async_context(worker.broker)
            worker.start()

        async def stop() -> None:
            await asyncio.gather(*(asyncio.to_thread(worker.running.stop) for worker in running))

        stack.push_async_callback(stop)
        broker_url = servers.broker_url
        teams = partial(others.audit, broker_url, record), partial(others.calculate, broker_url)
        works: list[Callable[[], Awaitable[None]]] = [*teams, *(worker.watch for worker in running)]
        for work in works:
            await stack.enter_async_context(in_background("harness", work))
        await asyncio.gather(*(worker.may_become_ready() for worker in running))
        headers = bearer(issuer.token(exp=int(time.time()) + _TOKEN_SECONDS))
        urls = [worker.base_url for worker in running if worker.role == "api"]
        apis = [httpx.AsyncClient(base_url=url, headers=headers, timeout=5.0) for url in urls]
        for api in apis:
            await stack.enter_async_context(api)
        of_load = Settings(
            database_url=_writable(servers), database_pool_size=16, database_timeout_seconds=2.0
        )
        pool = await stack.enter_async_context(open_pool(of_load))
        own_chance = random.Random(chance.random())  # noqa: S311 - its pace must not change the faults
        callers = others.Callers(record, pool, apis, own_chance)
        yield World(servers, running, mail, callers, issuer, record, chance)


def _writable(servers: Servers) -> str:
    """Return the URL for sessions that can write even if the default is read-only."""
    return f"{servers.postgres_url}?default_transaction_read_only=off"
