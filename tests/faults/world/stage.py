"""Everything that surrounds the load, started: databases, queues, teams, mail server, processes."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import httpx

from service.postgres.pool import open_pool
from service.server.background import in_background
from service.settings import Settings
from tests.faults.plan import TOKEN_SECONDS, Plan
from tests.faults.verdict.records import Record
from tests.faults.world import teams, workers
from tests.faults.world.callers import Callers
from tests.faults.world.mail import MailServer
from tests.faults.world.workers import Worker
from tests.faults.world.world import World, writable
from tests.harness import databases, queues
from tests.harness.examples import SECRET_KEYS
from tests.harness.http import bearer
from tests.harness.issuer import AUDIENCE, ISSUER, Issuer
from tests.harness.servers import Servers

RETENTION_DAYS = 30  # so that a wrong clock could let a relay erase requests

_APP_URL = "https://app.example.com"


async def prepare(servers: Servers) -> None:
    """Apply the schema, and declare the topology with the harness's own queues."""
    async with databases.connected(servers.postgres_url) as connection:
        await databases.prepare(connection)
    async with queues.open_channel(servers.broker_url) as channel:
        await teams.declare(channel)


@asynccontextmanager
async def started(
    plan: Plan, record: Record, servers: Servers, folder: Path, chance: random.Random
) -> AsyncIterator[World]:
    """Start the other teams, the mail server and the service's processes."""
    issuer = Issuer(folder)
    async with AsyncExitStack() as stack:
        mail = await stack.enter_async_context(MailServer(record, chance))
        settings = _settings(plan, issuer, mail)
        running = [
            Worker(name, servers, settings, record, folder, broken=plan.broken) for name in workers.NAMES
        ]
        for worker in running:
            await stack.enter_async_context(worker.postgres)
            await stack.enter_async_context(worker.broker)
        stack.push_async_callback(_stop_all, running)
        for worker in running:
            worker.start()
        for work in (
            partial(teams.audit, servers.broker_url, record),
            partial(teams.calculate, servers.broker_url),
        ):
            await stack.enter_async_context(in_background("harness", work))
        for worker in running:
            await stack.enter_async_context(in_background("harness", worker.watch))
        await asyncio.gather(*(worker.may_become_ready() for worker in running))
        headers = bearer(issuer.token(exp=int(time.time()) + TOKEN_SECONDS))
        clients = [
            httpx.AsyncClient(base_url=worker.base_url, headers=headers, timeout=5.0)
            for worker in running
            if worker.role == "api"
        ]
        apis = [await stack.enter_async_context(client) for client in clients]
        pool = await stack.enter_async_context(open_pool(_settings_of_load(servers)))
        own_chance = random.Random(plan.seed + 1)  # noqa: S311 - its pace must not change the faults
        yield World(
            servers=servers,
            workers=running,
            mail=mail,
            callers=Callers(record, pool, apis, own_chance),
            issuer=issuer,
            record=record,
            chance=chance,
            longest_stall_seconds=plan.longest_stall,
        )


def _settings(plan: Plan, issuer: Issuer, mail: MailServer) -> dict[str, str]:
    return {
        "APP_URL": _APP_URL,
        "REQUEST_SECRET_KEYS": SECRET_KEYS,
        "AUTH_ISSUER": ISSUER,
        "AUTH_AUDIENCE": AUDIENCE,
        "AUTH_JWKS_URL": issuer.jwks.as_uri(),
        "SMTP_URL": mail.url,
        "MAIL_FROM": "Calculations <calculations@service.example.com>",
        "RETENTION_DAYS": str(RETENTION_DAYS),
        "EMAIL_CLAIM_SECONDS": str(plan.email_claim_seconds),
        # By default the longest pauses between retries would outlast the run.
        "EMAIL_RETRY_SECONDS": "0.1",
    }


def _settings_of_load(servers: Servers) -> Settings:
    url = writable(servers.postgres_url)
    return Settings(database_url=url, database_pool_size=16, database_timeout_seconds=2.0)


async def _stop_all(running: Sequence[Worker]) -> None:
    started = [worker.running for worker in running if worker.is_running]
    await asyncio.gather(*(asyncio.to_thread(process.stop) for process in started))
