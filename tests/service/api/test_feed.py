"""GET /v1/event: a client that follows the recipe misses no event. Pages cost the same at any depth."""

import asyncio
import random
from typing import Any
from uuid import UUID

import httpx
import msgspec
import pytest

from service.calculation_requests import erasing, event_history
from service.calculation_requests.changing import change_all
from service.calculation_requests.reading import LARGEST_PAGE
from service.identifiers import uuid_of
from service.outbox.events import RequestEmailSent
from service.postgres.pool import Connection
from tests.harness import databases
from tests.harness.examples import CONVEYANCER, FREE_CONVEYANCER
from tests.harness.http import bearer
from tests.harness.waiting import eventually
from tests.service.api.test_list_requests import rows_read
from tests.worker.conftest import announce_next, store


class Reader:
    """A firm's program that follows the recipe: it stores each id once, with the cursor."""

    def __init__(self, client: httpx.AsyncClient, **parameters: Any) -> None:
        self.events: dict[str, Any] = {}
        self.pages: list[Any] = []
        self._client, self._parameters = client, parameters

    async def read(self) -> list[tuple[str, int]]:
        """Read on to the end. Returns request and sequence of all events so far, as they came."""
        more = True
        while more:
            page = (await self._client.get("/v1/event", params=self._parameters)).json()["data"]
            self.events |= {event["id"]: event for event in page["events"]}
            self.pages.append(page)
            self._parameters["after"], more = page["after"], page["more"]
        return [(event["subject"], event["data"]["sequence"]) for event in self.events.values()]

    async def reach(self, count: int) -> list[tuple[str, int]]:
        """Read on until there are as many events: another session of the server may delay them."""
        await eventually(lambda: self.read() if len(self.events) < count else True)
        return await self.read()


async def test_pages_neither_repeat_nor_skip_and_an_empty_one_gives_the_cursor_back(client, database):
    reader, late = Reader(client, limit=2), Reader(client, limit=5)
    assert await reader.read() == []
    requests = [await store(database, external_id="crm-17") for _ in range(5)]

    for each in (late, reader):
        assert await each.reach(5) == [(request.uuid, 1) for request in requests]

    assert [len(page["events"]) for page in reader.pages if page["events"]] == [2, 2, 1]
    assert reader.pages[-1] == {"events": [], "after": reader.pages[-2]["after"], "more": False}
    of_first = await client.get(f"/v1/request/{requests[0].uuid}/events")
    assert of_first.json()["data"]["events"] == reader.pages[1]["events"][:1]


async def test_feed_has_erased_requests_and_nothing_of_another_firm(client, database, issuer):
    anothers, erased = [await store(database, external_id="crm-17") for _ in range(2)]
    another_firm = "UPDATE event SET conveyancer_id = $2 WHERE request_id = $1"
    await database.execute(another_firm, anothers.id, FREE_CONVEYANCER)
    async with database.transaction():
        await erasing.erase(database, [erased.id])
    reader = Reader(client)

    assert {uuid for uuid, _ in await reader.reach(1)} == {erased.uuid}
    assert {each["data"].get("external_id") for each in reader.events.values()} == {None}
    client.headers.update(bearer(issuer.token(FREE_CONVEYANCER)))
    assert await Reader(client).reach(1) == [(anothers.uuid, 1)]
    assert (await client.get("/v1/event", params={"after": reader.pages[-1]["after"]})).status_code == 410


async def test_open_transaction_delays_the_feed_and_nothing_is_skipped(
    client, database, other_connection, administrator
):
    """Even one of another database."""
    first, reader = await store(database), Reader(client)
    async with other_connection.transaction():
        await announce_next(other_connection, first.id)
        later = await store(database)
        while_open = await reader.reach(1)
    async with administrator.transaction():
        await administrator.execute("SELECT pg_current_xact_id()")
        await announce_next(database, later.id)
        while_another_is_open = await reader.read()

    assert while_open == [(first.uuid, 1)]
    assert while_another_is_open == [(first.uuid, 1), (first.uuid, 2), (later.uuid, 1)]
    assert await reader.reach(4) == [*while_another_is_open, (later.uuid, 2)]


async def test_transactions_that_lock_requests_crosswise_keep_the_order_of_each(
    client, database, other_connection
):
    first, second = [await store(database) for _ in range(2)]
    reader = Reader(client, limit=1)
    async with other_connection.transaction():
        await announce_next(other_connection, first.id)
        await announce_next(database, second.id)
        await reader.read()
        await announce_next(other_connection, second.id)
        await reader.read()

    assert [sequence for uuid, sequence in await reader.reach(5) if uuid == second.uuid] == [1, 2, 3]


async def test_cursor_of_another_server_timeline_copy_or_future_is_outdated(client, database):
    await store(database)
    reader = Reader(client)
    await reader.read()
    (cursor,) = (page["after"] for page in reader.pages)

    others = [
        cursor[:start] + "f" * (end - start) + cursor[end:] for start, end in ((0, 16), (16, 24), (24, 40))
    ]
    others.append(f"{cursor[:40]}{'0' * 32}{cursor[72:]}")  # of an event that an older copy of the disk lacks
    for other in others:
        refused = await client.get("/v1/event", params={"after": other})
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (410, "cursor_outdated")


async def fill(database: Connection, conveyancer_id: str, *, events: int, characters: int = 10) -> None:
    """Write events of long ago, 300 in a transaction, each of a request of its own."""
    await database.execute(
        """
        INSERT INTO event (request_id, sequence, type, conveyancer_id, time, data, transaction)
        SELECT gen_random_uuid(), 1, 'request.created', $1, now(),
               json_build_object('sequence', 1, 'filler', repeat('x', $3)), (number / 300)::text::xid8
          FROM generate_series(1, $2) AS number
        """,
        *(conveyancer_id, events, characters),
    )


async def test_page_ends_before_it_is_too_large(client, database):
    await fill(database, CONVEYANCER, events=501, characters=3_000)
    reader = Reader(client, limit=500)

    assert len(await reader.read()) == 501
    assert [page["more"] for page in reader.pages] == [True, False]
    assert LARGEST_PAGE - 5_000 < len(msgspec.json.encode(reader.pages[0]["events"])) < LARGEST_PAGE + 1_000


@pytest.mark.parametrize("events", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
async def test_any_page_reads_only_its_own_rows(database, events):
    for conveyancer_id in (FREE_CONVEYANCER, CONVEYANCER):
        await fill(database, conveyancer_id, events=events)
    for plan in ("auto", "force_generic_plan", "force_custom_plan"):
        await database.execute(f"SET plan_cache_mode = {plan}")
        left, after = events, ""
        while left:
            reading = event_history.read_feed(database, CONVEYANCER, after=after, limit=250)
            page, rows = await rows_read(database, "event", reading)
            left, after = left - len(page.events), page.after
            assert (len(page.events), page.more) == (250, left > 0)
            assert rows <= 252  # the page, the cursor's event and the next one


@pytest.mark.long
async def test_reader_gets_every_event_in_order_while_twenty_writers_commit_late(client, database_url):
    chance = random.Random(17)  # noqa: S311 - not for secrets
    reader, requests = Reader(client, limit=7), list[UUID]()

    async def write() -> None:
        """Commit, or roll back, twelve transactions that write events of new requests and of old ones."""
        async with databases.connected(database_url) as database:
            for _ in range(12):
                transaction = database.transaction()
                await transaction.start()
                new = await store(database)
                await asyncio.sleep(chance.uniform(0, 2.5))
                old = chance.sample(requests, min(len(requests), 3))
                async with change_all(database, old, waits=False) as found:
                    for request in found.values():
                        request.announce(RequestEmailSent, email=1, kind="invitation")
                await asyncio.sleep(chance.uniform(0, 2.5))
                if chance.random() < 0.1:
                    await transaction.rollback()
                    continue
                await transaction.commit()
                requests.append(new.id)

    async with asyncio.TaskGroup() as writers:
        writing = [writers.create_task(write()) for _ in range(20)]
        while not all(each.done() for each in writing):
            await reader.read()
    async with databases.connected(database_url) as database:
        rows = await database.fetch("SELECT request_id, sequence FROM event ORDER BY request_id, sequence")

    written = [(uuid_of(request_id), sequence) for request_id, sequence in rows]
    assert sorted(await reader.reach(len(rows)), key=lambda event: event[0]) == written
    assert max(sequence for _, sequence in written) > 3
    assert len([page for page in reader.pages if page["events"]]) > 30
