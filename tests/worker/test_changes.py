"""GET /v1/request?updated_since=: a caller that repeats from `next_updated_since` misses no change."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from service.calculation_requests import erasing, reading
from service.calculation_requests.reading import Listing, Page, PlaceByChange
from service.postgres.pool import Connection
from tests.harness.examples import CONVEYANCER
from tests.worker.conftest import store
from tests.worker.steps import calculate

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


async def changes(client, since: str = "2000-01-01T00:00:00Z") -> tuple[set[str], str]:
    """Return the uuids of the requests that have changed since, and from when to repeat."""
    response = await client.get("/v1/request", params={"updated_since": since})
    data = response.json()["data"]
    assert data["next_cursor"] is None
    return {request["uuid"] for request in data["requests"]}, data["next_updated_since"]


async def read_changes(connection: Connection, since: datetime) -> Page:
    listing = Listing(None, 100, PlaceByChange(since, UUID(int=0)))
    return await reading.read_page(connection, listing, conveyancer_id=CONVEYANCER)


async def set_back(connection: Connection, request_id: UUID, *, seconds: int) -> None:
    statement = "UPDATE calculation_request SET updated_at = updated_at - $2::interval WHERE id = $1"
    await connection.execute(statement, request_id, timedelta(seconds=seconds))


async def test_change_is_listed_once_no_earlier_change_can_be_committed(
    client, database, other_connection, monkeypatch
):
    """Even if Postgres's clock was set back during an open transaction, by as much as HORIZON_SECONDS."""
    monkeypatch.setattr(reading, "HORIZON_SECONDS", 1)
    late, early, erased = [await store(database) for _ in range(3)]
    async with other_connection.transaction():
        await calculate(other_connection, late.uuid)
        await set_back(other_connection, late.id, seconds=1)
        for request in (early, erased):
            await calculate(database, request.uuid)
        await asyncio.sleep(2.1)
        while_open, since = await changes(client)
    async with database.transaction():
        await erasing.erase(database, [erased.id])
    after_commit, _ = await changes(client, since)

    assert while_open == set()
    assert after_commit == {late.uuid, early.uuid}


async def test_change_has_the_time_of_its_statement_not_of_its_transaction(
    client, database, other_connection, monkeypatch
):
    monkeypatch.setattr(reading, "HORIZON_SECONDS", 0)
    request = await store(database)
    async with other_connection.transaction():
        await asyncio.sleep(1.1)
        _, since = await changes(client)
        await calculate(other_connection, request.uuid)
    monkeypatch.setattr(reading, "HORIZON_SECONDS", -10)  # in the future

    assert (await changes(client, since))[0] == {request.uuid}


async def test_change_is_listed_even_if_it_is_committed_while_a_page_is_read(
    database, other_connection, monkeypatch
):
    monkeypatch.setattr(reading, "HORIZON_SECONDS", 0)
    request = await store(database)
    transaction = other_connection.transaction()
    await transaction.start()
    await calculate(other_connection, request.uuid)
    await asyncio.sleep(1.1)

    async def commit_after(read: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        result = await read(*arguments)
        if other_connection.is_in_transaction():
            await transaction.commit()
        return result

    reader: Any = SimpleNamespace(
        fetchval=partial(commit_after, database.fetchval), fetch=partial(commit_after, database.fetch)
    )
    first = await read_changes(reader, LONG_AGO)
    assert first.horizon
    second = await read_changes(database, first.horizon)

    assert request.id in [each.id for page in (first, second) for each in page.requests]


async def test_change_is_listed_after_half_a_minute(client, database):
    late, early = [await store(database) for _ in range(2)]
    for request, seconds in ((late, 20), (early, 31)):
        await calculate(database, request.uuid)
        await set_back(database, request.id, seconds=seconds)

    assert (await changes(client))[0] == {early.uuid}
