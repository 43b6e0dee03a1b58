"""Everything that surrounds the load, started: databases, queues, teams, mail server, processes."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import asyncpg
import httpx

from deploy.local.machine.ports import free_port
from service.postgres import outages
from service.server.background import in_background
from tests.faults.plan import TOKEN_SECONDS, Plan
from tests.faults.verdict.latency import Latencies
from tests.faults.verdict.records import CREATED, Arrival, Record
from tests.faults.world import own_queues, workers
from tests.faults.world.auditor import Auditor
from tests.faults.world.callers import Callers
from tests.faults.world.mail import MailServer
from tests.faults.world.team import team
from tests.faults.world.workers import APIS, NOTIFIERS
from tests.faults.world.world import World, connect
from tests.harness import databases, queues
from tests.harness.examples import SECRET_KEYS
from tests.harness.issuer import AUDIENCE, ISSUER, Issuer
from tests.harness.processes import Process, bare_environment, python
from tests.harness.servers import Servers


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The stage of a run: the world that faults change, and its observers."""

    world: World
    latencies: Latencies
    apis: list[httpx.AsyncClient]
    auditor: Auditor


async def prepare(servers: Servers) -> None:
    """Apply the schema, and declare the topology with the harness's own queues."""
    connection = await connect(servers.postgres.url)
    await databases.prepare(connection)
    await connection.close()
    async with queues.open_channel(servers.broker.url) as channel:
        await own_queues.declare(channel)


@asynccontextmanager
async def started(
    plan: Plan, record: Record, servers: Servers, folder: Path, chance: random.Random
) -> AsyncIterator[Stage]:
    """Start auditor, team, mail server, an old snapshot and the service's processes."""
    latencies = Latencies()
    issuer = Issuer(folder)
    auditor = Auditor(servers.broker.url, partial(_note, latencies))
    async with AsyncExitStack() as stack:
        mail = await stack.enter_async_context(MailServer(NOTIFIERS, chance))
        hold_snapshot = partial(_hold_snapshot, servers.postgres.url)
        for work in (auditor.run, team(servers.broker.url).run, hold_snapshot):
            await stack.enter_async_context(in_background("harness", work))
        running = await stack.enter_async_context(
            workers.started(
                partial(_process, plan, mail, issuer, folder),
                record,
                database_url=servers.postgres.url,
                amqp_url=servers.broker.url,
            )
        )
        for worker in running:
            await stack.enter_async_context(in_background("harness", worker.watch))
        token = issuer.token(exp=int(time.time()) + TOKEN_SECONDS)
        apis = [
            await stack.enter_async_context(_client(worker.process.base_url, token))
            for worker in running
            if worker.name in APIS
        ]
        world = World(
            servers=servers,
            workers=running,
            mail=mail,
            callers=Callers(record, latencies, apis, random.Random(plan.seed + 2)),  # noqa: S311 - no secret
            record=record,
            chance=chance,
            longest_stall_seconds=plan.longest_stall_seconds,
        )
        yield Stage(world=world, latencies=latencies, apis=apis, auditor=auditor)


def _note(latencies: Latencies, arrival: Arrival) -> None:
    if arrival.type == CREATED and not arrival.redelivered:
        latencies.arrived(arrival.key, arrival.at)


def _client(base_url: str, token: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=5.0)


def _process(
    plan: Plan, mail: MailServer, issuer: Issuer, folder: Path, name: str, database_url: str, amqp_url: str
) -> Process:
    """Return a process, not yet started."""
    role, port = name.partition("-")[0], free_port()
    module = [] if plan.broken is None else ["tests.faults.broken_programs", plan.broken]
    module += ["service", "serve"] if role == "api" else ["worker", role]
    environment = bare_environment(
        DATABASE_URL=database_url,
        APP_URL="https://app.example.com",
        REQUEST_SECRET_KEYS=SECRET_KEYS,
    )
    if role == "api":
        environment |= {
            "PORT": str(port),
            "AUTH_ISSUER": ISSUER,
            "AUTH_AUDIENCE": AUDIENCE,
            "AUTH_JWKS_URL": issuer.jwks.as_uri(),
        }
    else:
        environment |= {
            "HEALTH_PORT": str(port),
            "AMQP_URL": amqp_url,
            "SMTP_URL": mail.url_for(name if name in NOTIFIERS else NOTIFIERS[0]),
            "MAIL_FROM": "Calculations <calculations@service.example.com>",
            "EMAIL_CLAIM_SECONDS": str(plan.email_claim_seconds),
            # By default the longest pauses between retries would outlast the run.
            "EMAIL_RETRY_SECONDS": "0.1",
        }
    return Process(name, python(*module), environment=environment, port=port, folder=folder)


async def _hold_snapshot(url: str) -> None:
    """Keep an old snapshot open, and a new one after each outage of Postgres."""
    while True:
        with suppress(*outages.OUTAGE_ERRORS, asyncpg.PostgresError):
            connection = await asyncpg.connect(url, timeout=5.0, command_timeout=10.0)
            try:
                async with connection.transaction(isolation="repeatable_read"):
                    while True:
                        await connection.fetchval("SELECT count(*) FROM conveyancer")
                        await asyncio.sleep(5.0)
            finally:
                connection.terminate()
        await asyncio.sleep(0.2)
