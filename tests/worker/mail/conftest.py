"""Fixtures and queries of the tests of the ledger and the postman."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from service.calculation_requests.model import CalculationRequest
from service.postgres.pool import Connection
from tests.harness.mail_server import ScriptedMailServer
from tests.harness.stored import QUEUED
from tests.worker.conftest import store
from tests.worker.steps import intend


@pytest.fixture
async def rude_server() -> AsyncIterator[ScriptedMailServer]:
    """A mail server that can break the rules of SMTP."""
    async with ScriptedMailServer() as server:
        yield server


async def record_emails(database: Connection, number: int, **fields: Any) -> list[CalculationRequest]:
    """Store requests, each with a pending e-mail."""
    requests = [await store(database, **fields) for _ in range(number)]
    for request in requests:
        await intend(database, request)
    return requests


async def states(database: Connection) -> dict[str, int]:
    return dict(await database.fetch("SELECT state, count(*) FROM email GROUP BY state"))


async def all_are(database: Connection, state: str) -> bool:
    return list(await states(database)) == [state]


async def announced(database: Connection) -> list[tuple[str, dict[str, Any]]]:
    """Return the type and the data of the events about e-mails in the outbox."""
    rows = await database.fetch(QUEUED)
    return [(row["type"], json.loads(row["data"])) for row in rows if row["type"].startswith("request.email")]
