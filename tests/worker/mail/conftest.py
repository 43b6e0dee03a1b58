"""Fixtures and queries of the tests of the ledger and the postman."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from service.calculation_requests.model import CalculationRequest
from service.outbox.waking import RelayWaker
from service.postgres.pool import Connection, open_pool
from tests.harness.mail_server import ScriptedMailServer
from tests.harness.stored import QUEUED
from tests.worker.conftest import store
from tests.worker.steps import intend
from worker.mail.bounces import BounceReader
from worker.settings import EmailSettings


@pytest.fixture
async def rude_server() -> AsyncIterator[ScriptedMailServer]:
    """A mail server that can break the rules of SMTP."""
    async with ScriptedMailServer() as server:
        yield server


@asynccontextmanager
async def open_reader(settings: EmailSettings) -> AsyncIterator[BounceReader]:
    """Yield a reader with a pool of its own, as another process would have."""
    async with open_pool(settings) as pool:
        yield BounceReader(settings, pool, RelayWaker(pool, seconds=5.0))


async def record_emails(database: Connection, number: int) -> list[CalculationRequest]:
    requests = [await store(database) for _ in range(number)]
    for request in requests:
        await intend(database, request)
    return requests


async def states(database: Connection) -> dict[str, int]:
    return dict(await database.fetch("SELECT state, count(*) FROM email GROUP BY state"))


async def all_are(database: Connection, state: str) -> bool:
    return list(await states(database)) == [state]


async def attempts(database: Connection) -> int:
    total: int = await database.fetchval("SELECT sum(attempts) FROM email")
    return total


async def announced(database: Connection) -> list[tuple[str, int, str]]:
    """Return the events in the outbox: type, sequence and data."""
    rows = await database.fetch(QUEUED)
    return [(row["type"], row["sequence"], row["data"]) for row in rows]


async def is_claimed(database: Connection) -> bool:
    return bool(await database.fetchval("SELECT count(*) FROM email WHERE claimed_by IS NOT NULL"))
