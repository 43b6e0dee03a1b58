"""GET /v1/event: a client that follows the recipe misses no event. Pages cost the same at any depth."""

import asyncio
import random
from collections import defaultdict
from typing import Any
from uuid import UUID

import httpx
import msgspec
import pytest

from service.api.controllers.events import FeedQuery
from service.api.decoding import parse_query
from service.api.errors import InvalidSubmission
from service.api.openapi.examples import AFTER
from service.calculation_requests import erasing, event_history
from service.calculation_requests.changing import change_all
from service.calculation_requests.model import CalculationRequest
from service.calculation_requests.reading import LARGEST_PAGE
from service.outbox.events import RequestEmailSent, event_id, in_envelope
from service.postgres.pool import Connection
from tests.harness import databases
from tests.harness.documented_errors import is_documented
from tests.harness.examples import CONVEYANCER, FREE_CONVEYANCER
from tests.harness.http import bearer
from tests.harness.waiting import eventually
from tests.worker.conftest import announce_next, store


class Reader:
    """A firm's program that follows the recipe: it stores each id once, with the cursor."""

    def __init__(self, client: httpx.AsyncClient, **parameters: Any) -> None:
        self.events: dict[str, Any] = {}
        self.pages: list[Any] = []
        self._client = client
        self._parameters = parameters

    async def read(self) -> list[str]:
        """Read on to the end. Returns the ids of all events so far, in the order in which they came first."""
        more = True
        while more:
            response = await self._client.get("/v1/event", params=self._parameters)
            page = response.json()["data"]
            self.events |= {event["id"]: event for event in page["events"]}
            self.pages.append(page)
            self._parameters["after"], more = page["after"], page["more"]
        return [*self.events]

    async def reach(self, count: int) -> list[str]:
        """Read on until there are as many events: another session of the server may delay them."""
        await eventually(lambda: self.read() if len(self.events) < count else True)
        return await self.read()


def id_of(request: CalculationRequest, sequence: int = 1) -> str:
    """Return the id of an event of a request: its request.created, or one that `announce_next` wrote."""
    return event_id(request.uuid, "request.created" if sequence == 1 else RequestEmailSent.type, sequence)


async def test_pages_neither_repeat_nor_skip_and_an_empty_one_gives_the_cursor_back(client, database):
    reader, late = Reader(client, limit=2), Reader(client, limit=5)
    assert await reader.read() == []
    requests = [await store(database, external_id="crm-17") for _ in range(5)]

    for each in (late, reader):
        assert await each.reach(5) == [id_of(request) for request in requests]

    assert [len(page["events"]) for page in reader.pages if page["events"]] == [2, 2, 1]
    assert reader.pages[-1] == {"events": [], "after": reader.pages[-2]["after"], "more": False}
    of_first = await client.get(f"/v1/request/{requests[0].uuid}/events")
    assert of_first.json()["data"]["events"] == reader.pages[1]["events"][:1]


async def test_feed_has_erased_requests_and_nothing_of_another_firm(client, database, issuer):
    anothers, erased = [await store(database, external_id="crm-17") for _ in range(2)]
    await database.execute(
        "UPDATE event SET conveyancer_id = $2 WHERE request_id = $1", anothers.id, FREE_CONVEYANCER
    )
    async with database.transaction():
        await erasing.erase(database, [erased.id])
    reader = Reader(client)

    assert (await reader.reach(1))[0] == id_of(erased)
    of_erased = [(each["subject"], each["data"].get("external_id")) for each in reader.events.values()]
    assert set(of_erased) == {(erased.uuid, None)}
    client.headers.update(bearer(issuer.token(FREE_CONVEYANCER)))
    assert await Reader(client).reach(1) == [id_of(anothers)]
    assert await Reader(client, after=reader.pages[-1]["after"]).read() == []


async def test_open_transaction_delays_the_feed_and_nothing_is_skipped(
    client, database, other_connection, administrator
):
    """Even one of another database."""
    request, reader = await store(database), Reader(client)
    await reader.reach(1)

    async with other_connection.transaction():
        await announce_next(other_connection, request.id)
        later = await store(database)
        while_open = await reader.read()
    async with administrator.transaction():
        await administrator.execute("SELECT pg_current_xact_id()")
        await announce_next(database, later.id)
        while_another_is_open = await reader.read()

    assert while_open == [id_of(request)]
    assert while_another_is_open == [id_of(request), id_of(request, 2), id_of(later)]
    assert await reader.reach(4) == [*while_another_is_open, id_of(later, 2)]


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
    await reader.reach(5)

    sequences = [event["data"]["sequence"] for event in reader.events.values() if second.uuid in event["id"]]
    assert sequences == [1, 2, 3]


async def test_cursor_of_another_server_timeline_or_future_is_outdated(client, database):
    await store(database)
    reader = Reader(client)
    await reader.reach(1)
    cursor = reader.pages[-1]["after"]

    others = [
        "0" * 16 + cursor[16:],
        f"{cursor[:16]}{'f' * 8}{cursor[24:]}",
        f"{cursor[:24]}{'f' * 16}{cursor[40:]}",
    ]
    answers = [await client.get("/v1/event", params={"after": each}) for each in others]
    assert [answer.status_code for answer in answers] == [410] * 3
    assert {answer.json()["errors"][0]["code"] for answer in answers} == {"cursor_outdated"}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        *((f"after={cursor}", [("after", "invalid_cursor")]) for cursor in ("", AFTER[1:], AFTER + "%0A")),
        (f"after={AFTER[:72]}80000000", [("after", "invalid_cursor")]),  # a sequence that Postgres refuses
        (f"after={AFTER}&after={AFTER}&limit=501", [("after", "repeated"), ("limit", "out_of_range")]),
        ("limit=0&cursor=x", [("limit", "out_of_range"), ("cursor", "unknown_field")]),
    ],
)
def test_every_failing_parameter_is_reported(query, expected):
    with pytest.raises(InvalidSubmission) as refusal:
        parse_query(FeedQuery, query.encode())

    errors = refusal.value.errors
    assert [(error.field, error.code) for error in errors] == expected
    assert all(is_documented(422, error.code, error.message) for error in errors)


async def fill(database: Connection, conveyancer_id: str, *, events: int, characters: int = 10) -> None:
    """Write events of long ago, 300 in a transaction, each of a request of its own."""
    await database.execute(
        """
        INSERT INTO event (request_id, sequence, type, conveyancer_id, time, data, transaction)
        SELECT gen_random_uuid(), 1, 'request.created', $1, now(),
               json_build_object('external_id', repeat('x', $3)), (number / 300)::text::xid8
          FROM generate_series(1, $2) AS number
        """,
        conveyancer_id,
        events,
        characters,
    )


async def test_page_ends_before_it_is_too_large(client, database):
    await fill(database, CONVEYANCER, events=501, characters=3_000)
    reader = Reader(client, limit=500)

    assert len(await reader.read()) == 501
    assert [page["more"] for page in reader.pages] == [True, False]
    assert LARGEST_PAGE - 5_000 < len(msgspec.json.encode(reader.pages[0]["events"])) < LARGEST_PAGE + 1_000


async def test_any_page_reads_only_its_own_rows(database):
    """Of 100,000 events, which are read to the end, with each kind of plan."""
    for conveyancer_id in (FREE_CONVEYANCER, CONVEYANCER):
        await fill(database, conveyancer_id, events=100_000)
    rows = """
        SELECT seq_tup_read + coalesce(idx_tup_fetch, 0)
          FROM pg_stat_xact_user_tables
         WHERE relname = 'event'
        """
    for plan, limit in (("auto", 500), ("force_generic_plan", 500), ("force_custom_plan", 499)):
        await database.execute(f"SET plan_cache_mode = {plan}")
        after, more, count = "", True, 0
        while more:
            async with database.transaction():
                earlier = await database.fetchval(rows)
                page = await event_history.read_feed(database, CONVEYANCER, after=after, limit=limit)
                assert await database.fetchval(rows) - earlier <= limit + 1
            after, more, count = page.after, page.more, count + len(page.events)
        assert count == 100_000


@pytest.mark.long
async def test_reader_gets_every_event_in_order_while_twenty_writers_commit_late(client, database_url):
    chance = random.Random(17)  # noqa: S311 - not for secrets
    reader, requests = Reader(client, limit=7), list[UUID]()

    async def write(database: Connection) -> None:
        """Commit, or roll back, twelve transactions that write events of new requests and of old ones."""
        for _ in range(12):
            transaction = database.transaction()
            await transaction.start()
            new = await store(database)
            await asyncio.sleep(chance.uniform(0, 2.5))
            old = chance.sample(requests, min(len(requests), 3))
            async with change_all(database, old, waits=False) as found:
                for request in found.values():
                    request.announce(RequestEmailSent)
            await asyncio.sleep(chance.uniform(0, 2.5))
            if chance.random() < 0.1:
                await transaction.rollback()
            else:
                await transaction.commit()
                requests.append(new.id)

    async def write_on_own_connection() -> None:
        async with databases.connected(database_url) as database:
            await write(database)

    async with asyncio.TaskGroup() as writers:
        writing = [writers.create_task(write_on_own_connection()) for _ in range(20)]
        while not all(each.done() for each in writing):
            await reader.read()
            await asyncio.sleep(0.01)
    async with databases.connected(database_url) as database:
        written = {in_envelope(row).id for row in await database.fetch("SELECT * FROM event")}

    assert set(await reader.reach(len(written))) == written
    sequences = defaultdict(list)
    for event in reader.events.values():
        sequences[event["subject"]].append(event["data"]["sequence"])
    assert all(each == sorted(each) for each in sequences.values())
    assert max(map(len, sequences.values())) > 5
    assert len([page for page in reader.pages if page["events"]]) > 30
