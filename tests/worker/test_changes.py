"""GET /v1/request?updated_since=: a caller that repeats from `next_updated_since` misses no change."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from service.calculation_requests import erasing, reading
from service.calculation_requests.reading import Listing, Page, Place, PlaceByChange
from service.postgres.pool import Connection
from tests.harness.command_line import run
from tests.harness.databases import connected
from tests.harness.examples import CONVEYANCER
from tests.harness.waiting import eventually
from tests.worker.conftest import store
from tests.worker.deliveries import calculate

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
        await calculate(other_connection, late.uuid, "C-1")
        await set_back(other_connection, late.id, seconds=1)
        for request in (early, erased):
            await calculate(database, request.uuid, "C-1")
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
        await calculate(other_connection, request.uuid, "C-1")
    monkeypatch.setattr(reading, "HORIZON_SECONDS", -10)  # in the future

    assert (await changes(client, since))[0] == {request.uuid}


async def test_change_is_listed_even_if_it_is_committed_while_a_page_is_read(
    database, other_connection, monkeypatch
):
    monkeypatch.setattr(reading, "HORIZON_SECONDS", 0)
    request = await store(database)
    transaction = other_connection.transaction()
    await transaction.start()
    await calculate(other_connection, request.uuid, "C-1")
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
        await calculate(database, request.uuid, "C-1")
        await set_back(database, request.id, seconds=seconds)

    assert (await changes(client))[0] == {early.uuid}


async def test_new_link_is_a_change(client, database, environment, monkeypatch):
    monkeypatch.setattr(reading, "HORIZON_SECONDS", -10)
    request = await store(database)
    await calculate(database, request.uuid, "C-1")
    await database.execute("UPDATE calculation_request SET updated_at = $1", LONG_AGO - timedelta(1))
    before, _ = await changes(client)
    await run("service", "request", "new-secret", request.uuid, environment=environment)

    assert before == set()
    assert (await changes(client))[0] == {request.uuid}


@pytest.mark.parametrize("seconds", [2, pytest.param(20, marks=pytest.mark.long)])
async def test_no_change_is_missed_under_load(database_url, monkeypatch, seconds):
    """One commit is held open for *seconds*. Other transactions pause before and after their change."""
    monkeypatch.setattr(reading, "HORIZON_SECONDS", 0)
    until = time.monotonic() + 2 * seconds
    made: set[UUID] = set()

    async def change(pauses: Iterator[float], held_seconds: float = 0) -> None:
        async with connected(database_url) as own:
            while time.monotonic() < until:
                request = await store(own)
                async with own.transaction():
                    await asyncio.sleep(next(pauses))
                    await calculate(own, request.uuid, "C-1")
                    await asyncio.sleep(held_seconds or next(pauses))
                made.add(request.id)
                held_seconds = 0

    async def poll() -> None:
        after: Place = PlaceByChange(LONG_AGO, UUID(int=0))
        listed: set[UUID] = set()

        async def has_all() -> bool:
            nonlocal after
            page = await reading.read_page(own, Listing(None, 100, after), conveyancer_id=CONVEYANCER)
            listed.update(request.id for request in page.requests)
            after = page.next or PlaceByChange(page.horizon or LONG_AGO, UUID(int=0))
            return time.monotonic() > until and listed == made

        async with connected(database_url) as own:
            await eventually(has_all)

    async with asyncio.TaskGroup() as tasks:
        pauses = itertools.cycle(number / 30 for number in range(0, 45, 4))
        tasks.create_task(change(pauses, held_seconds=seconds))
        for task in [change(pauses) for _ in range(11)] + [poll() for _ in range(2)]:
            tasks.create_task(task)
