"""Everything that a fault can change."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx

from service.postgres import outages
from service.postgres.pool import Connection
from tests.faults.verdict.records import Record
from tests.faults.world.callers import Callers
from tests.faults.world.mail import MailServer
from tests.faults.world.workers import Worker
from tests.harness import databases
from tests.harness.issuer import Issuer
from tests.harness.processes import run_process
from tests.harness.rabbitmq_cluster import Cluster
from tests.harness.servers import Servers
from tests.harness.standby import Replicated
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import until

Result = TypeVar("Result")

HARNESS = "harness"  # application_name of the connections that no fault terminates
_TRY_SECONDS = 60.0
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class ClusteredServers(Servers):
    """All of them. `postgres` and `broker` are one of each; clients find the nodes in turn."""

    nodes: Cluster
    pair: Replicated
    to_postgres: TcpProxy


@dataclass(frozen=True, kw_only=True)
class World:
    """The servers, the service's processes, and the record of the run."""

    servers: Servers
    workers: Sequence[Worker]
    mail: MailServer
    callers: Callers
    issuer: Issuer
    record: Record
    chance: random.Random
    longest_stall_seconds: float

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
        """The proxies between the processes and the broker."""
        return [worker.broker for worker in self.workers if worker.role != "api"]

    def some_seconds(self, longest: float = 3.0) -> float:
        """Return how long a fault lasts."""
        return self.chance.uniform(0.2, longest)

    def stall_seconds(self) -> float:
        """Return how long a stall lasts: mostly short, at times longer than heartbeats and timeouts."""
        if self.chance.random() < 0.2:
            return self.chance.uniform(3.0, self.longest_stall_seconds)
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
        url = writable(self.servers.postgres_url)
        options = {"timeout": 5.0, "command_timeout": 30.0, "server_settings": {"application_name": HARNESS}}
        deadline = time.monotonic() + _TRY_SECONDS
        while True:
            try:
                async with databases.connected(url, **options) as connection:
                    return await work(connection)
            except outages.OUTAGE_ERRORS:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)


def writable(url: str) -> str:
    """Return the URL for sessions that can write even if the default is read-only."""
    return f"{url}?default_transaction_read_only=off"
