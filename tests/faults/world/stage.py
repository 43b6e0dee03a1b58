"""Everything that surrounds the load, started: databases, queues, teams, mail server, processes."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import httpx

from deploy.local.machine.folders import Place, Report
from service.postgres.pool import open_pool
from service.server.background import in_background
from service.settings import Settings
from tests.faults.verdict.records import Record
from tests.faults.world import teams, workers
from tests.faults.world.callers import Callers
from tests.faults.world.mail import MailServer
from tests.faults.world.workers import Worker
from tests.faults.world.world import ClusteredServers, World, writable
from tests.harness import databases, queues, scratch
from tests.harness.http import bearer
from tests.harness.issuer import AUDIENCE, ISSUER, Issuer
from tests.harness.processes import email_settings, environment_of
from tests.harness.rabbitmq_cluster import three_nodes
from tests.harness.servers import Servers
from tests.harness.standby import replicated
from tests.harness.tcp_proxy import TcpProxy

RETENTION_DAYS = 30  # so that a wrong clock could let a relay erase requests
_TOKEN_SECONDS = 100 * 24 * 3600  # longer than a fault sets a clock ahead


@asynccontextmanager
async def clustered_servers(report: Report) -> AsyncIterator[ClusteredServers]:
    """Start three nodes of RabbitMQ and a pair of Postgres, each behind one address, as in Kubernetes."""
    with scratch.folder() as folder, three_nodes(Place(folder=folder, report=report)) as nodes:
        async with (
            replicated() as pair,
            TcpProxy(pair.primary_url) as to_postgres,
            TcpProxy(nodes.nodes[0].url) as to_broker,
        ):
            to_broker.lead_to(*(node.url for node in nodes.nodes))
            urls = to_postgres.url, to_broker.url
            yield ClusteredServers(pair.primary, nodes.nodes[0], *urls, nodes, pair, to_postgres)


@asynccontextmanager
async def started(
    servers: Servers,
    record: Record,
    folder: Path,
    chance: random.Random,
    *,
    broken: str | None,
    longest_stall: float,
) -> AsyncIterator[World]:
    """Apply the schema, and start the other teams, the mail server and the service's processes."""
    async with databases.connected(servers.postgres_url) as connection:
        await databases.prepare(connection)
    async with queues.open_channel(servers.broker_url) as channel:
        await teams.declare(channel)
    issuer = Issuer(folder)
    async with AsyncExitStack() as stack:
        mail = await stack.enter_async_context(MailServer(record, chance))
        settings = _settings(record, issuer, mail)
        running = [Worker(name, servers, settings, record, folder, broken=broken) for name in workers.NAMES]
        for worker in running:
            await stack.enter_async_context(worker.postgres)
            await stack.enter_async_context(worker.broker)
            worker.start()

        async def stop() -> None:
            await asyncio.gather(*(asyncio.to_thread(worker.running.stop) for worker in running))

        stack.push_async_callback(stop)
        works = [worker.watch for worker in running]
        works += [
            partial(teams.audit, servers.broker_url, record),
            partial(teams.calculate, servers.broker_url),
        ]
        for work in works:
            await stack.enter_async_context(in_background("harness", work))
        await asyncio.gather(*(worker.may_become_ready() for worker in running))
        headers = bearer(issuer.token(exp=int(time.time()) + _TOKEN_SECONDS))
        apis = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=worker.base_url, headers=headers, timeout=5.0)
            )
            for worker in running
            if worker.role == "api"
        ]
        url = writable(servers.postgres_url)
        of_load = Settings(database_url=url, database_pool_size=16, database_timeout_seconds=2.0)
        pool = await stack.enter_async_context(open_pool(of_load))
        own_chance = random.Random(chance.random())  # noqa: S311 - its pace must not change the faults
        yield World(
            servers=servers,
            workers=running,
            mail=mail,
            callers=Callers(record, pool, apis, own_chance),
            issuer=issuer,
            record=record,
            chance=chance,
            longest_stall_seconds=longest_stall,
        )


def _settings(record: Record, issuer: Issuer, mail: MailServer) -> dict[str, str]:
    settings = email_settings(
        smtp_url=mail.url,
        retention_days=RETENTION_DAYS,
        email_claim_seconds=record.email_claim_seconds,
        email_retry_seconds=0.1,  # By default the longest pauses between retries would outlast the run.
    )
    of_api = {"AUTH_ISSUER": ISSUER, "AUTH_AUDIENCE": AUDIENCE, "AUTH_JWKS_URL": issuer.jwks.as_uri()}
    return environment_of(settings, **of_api)
