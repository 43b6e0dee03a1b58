"""GET /v1/request: a conveyancer's own requests, newest first, in pages that cost the same at any depth."""

from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from itertools import product
from typing import Any
from uuid import UUID

import httpx
import pytest

from service.api.controllers.events import FeedQuery
from service.api.decoding import parse_query
from service.api.envelope import FieldError
from service.api.errors import InvalidSubmission
from service.api.listing import FILTERS, ListQuery
from service.api.openapi.examples import AFTER
from service.calculation_requests import reading
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.identifiers import new_request_id, uuid_of
from service.postgres.pool import Connection
from tests.harness.documented_errors import is_documented
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.http import bearer

_NEWEST = UUID(int=2**128 - 1)
OTHERS = ("a-firm-of-long-ago", *(f"firm-{number}" for number in range(19)))


async def create(client: httpx.AsyncClient, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Create requests one after another; return them as the API shows them, newest first."""
    responses = [await client.post("/v1/request", json=A_REQUEST | fields) for _ in range(count)]
    return [response.json()["data"] for response in reversed(responses)]


async def page(client: httpx.AsyncClient, **parameters: Any) -> Any:
    response = await client.get("/v1/request", params=parameters)
    assert response.status_code == 200, response.text
    return response.json()["data"]


def errors(query: str) -> list[FieldError]:
    """Return the errors of a query of the list, or of the feed, by field."""
    with pytest.raises(InvalidSubmission) as refusal:
        parse_query(FeedQuery if "after" in query else ListQuery, query.encode())
    assert {error.pointer for error in refusal.value.errors} == {None}
    return sorted(refusal.value.errors, key=lambda error: str(error.field))


async def test_page_has_the_twenty_newest_requests_by_default_and_the_last_one_may_be_full(client):
    created = await create(client, 22, meta_data={"z": 1, "a": None}, notes="é")

    first = await page(client)
    rest = await page(client, cursor=first["next_cursor"], limit=2)

    assert first["requests"] == created[:20]
    assert rest == {"requests": created[20:], "next_cursor": None}


async def test_page_ends_before_it_is_too_large(client):
    """However large the requests are, and whether they are read in one batch or in several."""
    newest = (await create(client, 60))[:30]
    largest = await create(client, 1, notes="\U0001f600" * 10_000, meta_data={"a": "x" * 16_000})
    for _ in range(44):
        await client.post("/v1/request", json=A_REQUEST | {"notes": "\U0001f600" * 10_000})
    first = await client.get("/v1/request", params={"limit": 100})
    cursor = first.json()["data"]["next_cursor"]
    second = await client.get("/v1/request", params={"limit": 100, "cursor": cursor})

    assert max(len(response.content) for response in (first, second)) < reading.LARGEST_PAGE + 30_000
    listed = first.json()["data"]["requests"] + second.json()["data"]["requests"]
    assert len({each["uuid"] for each in listed}) == len(listed) == 105
    assert listed[44:75] == largest + newest
    assert second.json()["data"]["next_cursor"] is None


async def test_paging_neither_repeats_nor_skips_while_requests_come_in(client):
    created = await create(client, 7)
    some = await page(client, limit=2)
    listed = some["requests"]
    while some["next_cursor"]:
        await create(client, 3)
        some = await page(client, limit=2, cursor=some["next_cursor"])
        listed += some["requests"]

    assert listed == created


async def test_requests_of_other_conveyancers_are_not_listed(client, issuer):
    created = await create(client, 2, external_id="shared")
    as_another = bearer(issuer.token(FREE_CONVEYANCER))
    others = await client.post("/v1/request", json=A_REQUEST | {"external_id": "shared"}, headers=as_another)

    for parameters in ({}, {"external_id": "shared"}, {"cursor": others.json()["data"]["uuid"]}):
        assert (await page(client, **parameters))["requests"] == created
    listed = await client.get("/v1/request", headers=as_another, params={"cursor": uuid_of(new_request_id())})
    assert listed.json()["data"]["requests"] == [others.json()["data"]]


@pytest.mark.parametrize("name", FILTERS)
async def test_requests_are_filtered(client, name):
    await create(client, 1)
    wanted = await create(client, 3, **{name: "crm 17/é+&"})
    await create(client, 1, **{name: "crm 17/é+&!"})

    filters = {name: "crm 17/é+&"}
    first = await page(client, **filters, limit=2)
    second = await page(client, **filters, limit=2, cursor=first["next_cursor"])
    unfiltered = await page(client, limit=2)
    others = [({}, first), ({name: "crm 17/é+&!"}, first), (filters, unfiltered)]
    refused = [
        await client.get("/v1/request", params=filters | {"cursor": other["next_cursor"]})
        for filters, other in others
    ]

    assert first["requests"] + second["requests"] == wanted
    assert second["next_cursor"] is None
    assert (await page(client, **{name: "nobody's"}))["requests"] == []
    assert [each.json()["errors"][0]["code"] for each in refused] == ["invalid_cursor"] * 3


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("limit=0", [("limit", "out_of_range")]),
        ("limit=" + "9" * 5000, [("limit", "out_of_range")]),
        ("limit=1e400", [("limit", "out_of_range")]),
        ("limit=", [("limit", "invalid_type")]),
        ("limit=5.5", [("limit", "invalid_type")]),
        ("limit=%2B5", [("limit", "invalid_type")]),
        ("limit=%D9%A5", [("limit", "invalid_type")]),
        ("cursor=", [("cursor", "invalid_cursor")]),
        ("cursor=req_" + "z" * 22, [("cursor", "invalid_cursor")]),
        ("external_id=" + "x" * 256, [("external_id", "too_long")]),
        ("external_id=a%00b", [("external_id", "invalid_characters")]),
        ("external_id=a&external_id=b", [("external_id", "repeated")]),
        *((f"after={cursor}", [("after", "invalid_cursor")]) for cursor in ("", AFTER[1:], AFTER + "%0A")),
        (f"after={AFTER[:72]}80000000", [("after", "invalid_cursor")]),  # a sequence that Postgres refuses
        (f"after={AFTER}&limit=501", [("limit", "out_of_range")]),
        ("offset=20", [("offset", "unknown_field")]),
        ("=", [("", "unknown_field")]),
        (
            "limit=0&cursor=x&external_id=%00&page=1&page=2",
            [
                ("cursor", "invalid_cursor"),
                ("external_id", "invalid_characters"),
                ("limit", "out_of_range"),
                ("page", "unknown_field"),
            ],
        ),
    ],
)
def test_every_failing_parameter_is_reported(query, expected):
    reported = errors(query)

    assert [(error.field, error.code) for error in reported] == expected
    assert all(is_documented(422, error.code, error.message) for error in reported)


def test_at_most_fifty_unknown_parameters_are_reported():
    query = "&".join(["limit=0", *(f"p{number}" for number in range(5_000))])

    assert Counter(error.code for error in errors(query)) == {"out_of_range": 1, "unknown_field": 50}


async def fill(connection: Connection, *, rows: int) -> None:
    """Store requests a millisecond apart: the oldest 5 % of OTHERS[0], the rest of twenty firms in turn."""
    await connection.execute(
        """
        INSERT INTO calculation_request (
               id, conveyancer_id, created_at, updated_at,
               customer_email, customer_first_name, customer_last_name,
               sender_email, sender_organization_name, sender_first_name, sender_last_name,
               case_ref, request_type, external_id, calculation_fee_exempt, secret_salt, secret_key_id)
        SELECT (lpad(to_hex(1700000000000 + number), 12, '0') || '7000' || '8'
                || right(md5(number::text), 15))::uuid,
               CASE WHEN number <= $1 / 20 THEN $2
                    WHEN number % 20 = 0 THEN $3
                    ELSE 'firm-' || number % 20 - 1 END,
               made.at, made.at, 'customer-' || number || '@customer.example.com', 'Ada', 'Lovelace',
               'grace@firm.example.com', 'Hopper & Partners', 'Grace', 'Hopper',
               '12 High Street', 'SDLT_CALCULATION', 'case-' || number / 20 % 20, false,
               decode(md5(number::text), 'hex'), 'current'
          FROM generate_series(1, $1) AS number,
               LATERAL (SELECT to_timestamp(1700000000 + number / 1000) AS at) AS made
        """,
        rows,
        OTHERS[0],
        CONVEYANCER,
    )
    await connection.execute("VACUUM ANALYZE calculation_request")


async def rows_read(database: Connection, table: str, reading: Awaitable[Any]) -> tuple[Any, int]:
    """Return what *reading* returns, and how many rows of a table Postgres reads for it."""
    read = """
        SELECT seq_tup_read + coalesce(idx_tup_fetch, 0)
          FROM pg_stat_xact_user_tables
         WHERE relname = $1
        """
    async with database.transaction():
        earlier = await database.fetchval(read, table)
        page = None
        with suppress(UnknownConveyancer):
            page = await reading
        return page, await database.fetchval(read, table) - earlier


async def test_any_page_reads_only_its_own_rows(database):
    """It reads none of the newer ones of its firm or of others, and sorts no more than it shows."""
    await fill(database, rows=40_000)
    ids = "SELECT id FROM calculation_request WHERE conveyancer_id = $1 ORDER BY id"
    middle = await database.fetchval(f"{ids} LIMIT 1 OFFSET 500", CONVEYANCER)
    # Of all but CONVEYANCER, the requests are older than all others, or there are none.
    places = [(CONVEYANCER, _NEWEST), (CONVEYANCER, middle), (OTHERS[0], _NEWEST), ("nobody", _NEWEST)]

    plans = ("auto", "force_generic_plan", "force_custom_plan")
    for plan, filters in product(plans, ({}, *({name: "case-7"} for name in FILTERS))):
        await database.execute(f"SET plan_cache_mode = {plan}")
        for _ in range(7):  # Postgres may use a generic plan from the sixth execution on.
            for firm, after in places:
                reading_page = reading.read_page(database, firm, filters, after=after, limit=20)
                _, rows = await rows_read(database, "calculation_request", reading_page)
                assert rows == 21 or (rows < 21 and firm != CONVEYANCER)
