"""The loop that erases requests older than RETENTION_DAYS."""

import asyncio
import random
from contextlib import suppress
from uuid import UUID

import asyncpg
import structlog

from service.calculation_requests import erasing
from service.outbox.waking import RelayWaker
from service.postgres import connections, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.postgres.schema import SchemaOutdated
from service.telemetry import logs
from worker.settings import WorkerSettings
from worker.waiting import wait_at_most

_REST_SECONDS = 3600.0  # between rounds, on average
_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '0.5s'"  # for an event or e-mail that others hold

_log = structlog.get_logger()


async def run(settings: WorkerSettings, pool: Pool, relay: RelayWaker, stop: asyncio.Event) -> None:
    """Erase requests older than RETENTION_DAYS about every hour until *stop*. Several replicas may do so."""
    while not stop.is_set():
        await erase_old(settings, pool, relay, stop)
        await wait_at_most(random.uniform(0.5, 1.5) * _REST_SECONDS, stop)  # noqa: S311 - spreads replicas


async def erase_old(settings: WorkerSettings, pool: Pool, relay: RelayWaker, stop: asyncio.Event) -> None:
    """Erase the oldest requests one by one, until *stop*. A locked request waits for a later round."""
    number, seconds = 0, settings.work_timeout_seconds
    try:
        async with connections.acquired(pool, seconds=seconds) as connection:
            oldest = await find_oldest(connection, settings.retention_days)
        for request_id in oldest:
            if stop.is_set():
                break
            erased: set[UUID] = set()
            async with connections.transaction(pool, seconds=seconds, settings=_LOCK_TIMEOUT) as connection:
                with suppress(asyncpg.LockNotAvailableError):  # COMMIT rolls a failed transaction back.
                    erased = await erasing.erase(connection, [request_id])
            if erased:
                relay.wake()
            number += len(erased)
    except (PostgresUnavailable, SchemaOutdated) as error:
        _log.warning("retention_interrupted", error=logs.summarize(error))
    if number:
        _log.info("requests_erased", number=number)


async def find_oldest(connection: Connection, days: int | None) -> list[UUID]:
    """Return the oldest requests that are older than *days*: at most a hundredth of all, or ten.

    Returns nothing if a clock is wrong. It may be Postgres's, which dated the requests, and an erasure cannot
    be undone. Locked requests are left out, so that they hold up no others.
    """
    if warning := await schema.check(connection):
        _log.warning("retention_refused", reason=warning)
        return []
    rows = await connection.fetch(
        """
        SELECT id
          FROM calculation_request
         WHERE created_at < now() - make_interval(days => $1)
         ORDER BY created_at
         LIMIT (SELECT least(10000, greatest(10, reltuples / 100))::bigint
                  FROM pg_class
                 WHERE oid = 'calculation_request'::regclass)
           FOR NO KEY UPDATE SKIP LOCKED
        """,
        days,
    )
    return [row["id"] for row in rows]
