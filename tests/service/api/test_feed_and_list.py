"""GET /v1/event and GET /v1/request: nothing is missed or repeated, and pages cost the same at any depth."""

from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from itertools import product
from typing import Any
from uuid import UUID

import httpx
import msgspec
import pytest

from service.api.controllers.events import FeedQuery
from service.api.decoding import parse_query
from service.api.envelope import FieldError
from service.api.errors import InvalidSubmission
from service.api.listing import FILTERS, ListQuery
from service.api.openapi.examples import AFTER
from service.calculation_requests import erasing, event_history, reading
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.reading import LARGEST_PAGE
from service.identifiers import new_request_id, uuid_of
from service.postgres.pool import Connection
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.http import bearer, is_documented
from tests.harness.waiting import eventually
from tests.worker.conftest import announce_next, store

PLANS = ("auto", "force_generic_plan", "force_custom_plan")
OTHERS = ("a-firm-of-long-ago", *(f"firm-{number}" for number in range(19)))
_NEWEST = UUID(int=2**128 - 1)


class Reader:
    """A firm's program that follows the recipe for the feed: it stores each id once, with the cursor."""

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


async def create(client: httpx.AsyncClient, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Create requests one after another; return them as the API shows them, newest first."""
    responses = [await client.post("/v1/request", json=A_REQUEST | fields) for _ in range(count)]
    return [response.json()["data"] for response in reversed(responses)]


async def list_page(client: httpx.AsyncClient, **parameters: Any) -> Any:
    response = await client.get("/v1/request", params=parameters)
    assert response.status_code == 200, response.text
    return response.json()["data"]


async def rows_read(database: Connection, table: str, reading: Awaitable[Any]) -> tuple[Any, int]:
    """Return what *reading* returns, and how many rows of a table Postgres reads for it."""
    read = "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relname = $1"
    async with database.transaction():
        earlier = await database.fetchval(read, table)
        page = None
        with suppress(UnknownConveyancer):
            page = await reading
        return page, await database.fetchval(read, table) - earlier


async def test_pages_of_the_feed_neither_repeat_nor_skip(client, database):
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


async def test_open_transaction_delays_the_feed(client, database, other_connection, administrator):
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


async def test_crosswise_transactions_keep_the_order_of_each(client, database, other_connection):
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

    parts = ((0, 16), (16, 24), (24, 40))
    others = [cursor[:start] + "f" * (end - start) + cursor[end:] for start, end in parts]
    others.append(f"{cursor[:40]}{'0' * 32}{cursor[72:]}")  # of an event that an older copy of the disk lacks
    for other in others:
        refused = await client.get("/v1/event", params={"after": other})
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (410, "cursor_outdated")


async def fill_feed(database: Connection, conveyancer_id: str, *, events: int, characters: int = 10) -> None:
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


async def test_page_of_the_feed_ends_before_it_is_too_large(client, database):
    await fill_feed(database, CONVEYANCER, events=501, characters=3_000)
    reader = Reader(client, limit=500)

    assert len(await reader.read()) == 501
    assert [page["more"] for page in reader.pages] == [True, False]
    assert LARGEST_PAGE - 5_000 < len(msgspec.json.encode(reader.pages[0]["events"])) < LARGEST_PAGE + 1_000


@pytest.mark.parametrize("events", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
async def test_any_page_of_the_feed_reads_only_its_own_rows(database, events):
    for conveyancer_id in (FREE_CONVEYANCER, CONVEYANCER):
        await fill_feed(database, conveyancer_id, events=events)
    for plan in PLANS:
        await database.execute(f"SET plan_cache_mode = {plan}")
        left, after = events, ""
        while left:
            reading_page = event_history.read_feed(database, CONVEYANCER, after=after, limit=250)
            page, rows = await rows_read(database, "event", reading_page)
            left, after = left - len(page.events), page.after
            assert (len(page.events), page.more) == (250, left > 0)
            assert rows <= 252  # the page, the cursor's event and the next one


async def test_list_has_the_newest_first_and_neither_repeats_nor_skips_while_requests_come_in(client):
    created = await create(client, 22, meta_data={"z": 1, "a": None}, notes="é")
    some = await list_page(client)
    listed = some["requests"]
    assert len(listed) == 20
    while some["next_cursor"]:
        await create(client, 3)
        some = await list_page(client, limit=1, cursor=some["next_cursor"])
        listed += some["requests"]

    assert listed == created


async def test_page_of_the_list_ends_before_it_is_too_large(client, database):
    """However large the requests are, and whether they are read in one batch or in several."""
    notes = [None] * 60 + ["\U0001f600" * 10_000] * 45
    stored = [(await store(database, notes=each)).uuid for each in notes]
    first = await client.get("/v1/request", params={"limit": 100})
    cursor = first.json()["data"]["next_cursor"]
    second = await client.get("/v1/request", params={"limit": 100, "cursor": cursor})

    assert max(len(response.content) for response in (first, second)) < LARGEST_PAGE + 30_000
    listed = first.json()["data"]["requests"] + second.json()["data"]["requests"]
    assert [each["uuid"] for each in listed] == stored[::-1]
    assert second.json()["data"]["next_cursor"] is None


async def test_requests_of_other_conveyancers_are_not_listed(client, issuer):
    created = await create(client, 2, external_id="shared")
    as_another = bearer(issuer.token(FREE_CONVEYANCER))
    others = await client.post("/v1/request", json=A_REQUEST | {"external_id": "shared"}, headers=as_another)

    for parameters in ({}, {"external_id": "shared"}, {"cursor": others.json()["data"]["uuid"]}):
        assert (await list_page(client, **parameters))["requests"] == created
    listed = await client.get("/v1/request", headers=as_another, params={"cursor": uuid_of(new_request_id())})
    assert listed.json()["data"]["requests"] == [others.json()["data"]]


@pytest.mark.parametrize("name", FILTERS)
async def test_requests_are_filtered(client, name):
    wanted, other = {name: "crm 17/é+&"}, {name: "crm 17/é+&!"}
    await create(client, 1)
    created = await create(client, 3, **wanted)
    await create(client, 1, **other)

    first = await list_page(client, **wanted, limit=2)
    second = await list_page(client, **wanted, limit=2, cursor=first["next_cursor"])
    unfiltered = await list_page(client, limit=2)
    assert first["requests"] + second["requests"] == created
    assert second["next_cursor"] is None
    assert (await list_page(client, **{name: "nobody's"}))["requests"] == []
    for filters, page in (({}, first), (other, first), (wanted, unfiltered)):
        refused = await client.get("/v1/request", params=filters | {"cursor": page["next_cursor"]})
        assert refused.json()["errors"][0]["code"] == "invalid_cursor"


def errors(query: str) -> list[FieldError]:
    """Return the errors of a query of the list, or of the feed, by field."""
    with pytest.raises(InvalidSubmission) as refusal:
        parse_query(FeedQuery if "after" in query else ListQuery, query.encode())
    assert {error.pointer for error in refusal.value.errors} == {None}
    return sorted(refusal.value.errors, key=lambda error: str(error.field))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        *((f"limit={limit}", {"limit": "out_of_range"}) for limit in ("0", "9" * 5000, "1e400")),
        *((f"limit={limit}", {"limit": "invalid_type"}) for limit in ("", "5.5", "%2B5", "%D9%A5")),
        *((f"cursor={cursor}", {"cursor": "invalid_cursor"}) for cursor in ("", "req_" + "z" * 22)),
        ("external_id=" + "x" * 256, {"external_id": "too_long"}),
        ("external_id=a%00b", {"external_id": "invalid_characters"}),
        ("external_id=a&external_id=b", {"external_id": "repeated"}),
        *((f"after={cursor}", {"after": "invalid_cursor"}) for cursor in ("", AFTER[1:], AFTER + "%0A")),
        (f"after={AFTER[:72]}80000000", {"after": "invalid_cursor"}),  # a sequence that Postgres refuses
        (f"after={AFTER}&limit=501", {"limit": "out_of_range"}),
        *((f"{name}={value}", {name: "unknown_field"}) for name, value in (("offset", 20), ("", ""))),
        (
            "limit=0&cursor=x&external_id=%00&page=1&page=2",
            {"cursor": "invalid_cursor", "external_id": "invalid_characters"}
            | {"limit": "out_of_range", "page": "unknown_field"},
        ),
    ],
)
def test_every_failing_parameter_is_reported(query, expected):
    reported = errors(query)

    assert [(error.field, error.code) for error in reported] == [*expected.items()]
    assert all(is_documented(422, error.code, error.message) for error in reported)


def test_at_most_fifty_unknown_parameters_are_reported():
    reported = errors("&".join(["limit=0", *(f"p{number}" for number in range(5_000))]))

    assert Counter(error.code for error in reported) == {"out_of_range": 1, "unknown_field": 50}


async def fill(database: Connection, *, rows: int) -> None:
    """Store requests a millisecond apart: the oldest 5 % of OTHERS[0], the rest of twenty firms in turn."""
    await store(database)
    await database.execute(
        """
        INSERT INTO calculation_request
        SELECT made.*
          FROM calculation_request AS request, generate_series(1, $1) AS number,
               jsonb_populate_record(request, jsonb_build_object(
                   'id', '0' || to_hex(1700000000000 + number) || '70008' || right(md5(number::text), 15),
                   'conveyancer_id', CASE WHEN number <= $1 / 20 THEN $2
                                          WHEN number % 20 = 0 THEN $3
                                          ELSE 'firm-' || number % 20 - 1 END,
                   'external_id', 'case-' || number / 20 % 20)) AS made
        """,
        *(rows, OTHERS[0], CONVEYANCER),
    )
    await database.execute("VACUUM ANALYZE calculation_request")


async def test_any_page_of_the_list_reads_only_its_own_rows(database):
    """It reads none of the newer ones of its firm or of others, and sorts no more than it shows."""
    await fill(database, rows=40_000)
    ids = "SELECT id FROM calculation_request WHERE conveyancer_id = $1 ORDER BY id"
    middle = await database.fetchval(f"{ids} LIMIT 1 OFFSET 500", CONVEYANCER)
    # Of all but CONVEYANCER, the requests are older than all others, or there are none.
    places = [(CONVEYANCER, _NEWEST), (CONVEYANCER, middle), (OTHERS[0], _NEWEST), ("nobody", _NEWEST)]

    for plan, filters in product(PLANS, ({}, *({name: "case-7"} for name in FILTERS))):
        await database.execute(f"SET plan_cache_mode = {plan}")
        # Postgres may use a generic plan from the sixth execution on.
        for _, (firm, after) in product(range(7), places):
            reading_page = reading.read_page(database, firm, filters, after=after, limit=20)
            _, rows = await rows_read(database, "calculation_request", reading_page)
            assert rows == 21 or (rows < 21 and firm != CONVEYANCER)
