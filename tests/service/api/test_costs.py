"""What the endpoints cost Postgres, in counts that are the same on every machine."""

import asyncio

import httpx

from service.identifiers import new_request_id, uuid_of
from tests.benchmarks import subjects
from tests.harness.examples import A_REQUEST
from tests.harness.http import bearer
from tests.harness.statement_log import StatementLog
from tests.harness.waiting import eventually

_CALLS = 20
_KEYS = ["key-0", *(f"key-{number}" if number % 2 else None for number in range(1, _CALLS))]
# 1,600 measured: a request in a table and four indexes, its event and its pointer in tables with two each.
_MOST_WAL_BYTES = 1_640


def of_requests(statements: StatementLog) -> list[str]:
    """Return the statements executed for requests, without the NOTIFYs that requests of a few ms share."""
    return [each for each in statements.executed if not each.lstrip().startswith("SELECT pg_notify")]


def round_trips_of_requests(statements: StatementLog) -> int:
    """Return the round trips without those of the NOTIFYs. A NOTIFY is one, once it is prepared."""
    return statements.round_trips - notifies(statements)


def notifies(statements: StatementLog) -> int:
    return len(statements.executed) - len(of_requests(statements))


async def create(client: httpx.AsyncClient, key: str | None = None) -> httpx.Response:
    return await client.post("/v1/request", json=A_REQUEST, headers={"Idempotency-Key": key} if key else {})


async def warm(client: httpx.AsyncClient, statements: StatementLog) -> None:
    """Have the statements of creates prepared, NOTIFY included, and forget them."""

    async def creates_notify() -> bool:
        await asyncio.gather(create(client), create(client))
        return notifies(statements) > 0

    await eventually(creates_notify)
    statements.clear()


async def test_create_is_one_statement_in_one_round_trip(watched_client, statements):
    await warm(watched_client, statements)

    for key in _KEYS:
        assert (await create(watched_client, key)).status_code == 200

    stored = of_requests(statements)
    assert len(stored) == _CALLS
    assert all("INSERT INTO calculation_request" in each and "INSERT INTO outbox" in each for each in stored)
    assert round_trips_of_requests(statements) == _CALLS
    assert notifies(statements) <= _CALLS + 1  # The NOTIFY of the last create before these may come late.


async def test_reading_takes_a_statement_for_the_request_and_one_for_its_events(
    watched_client, statements, issuer
):
    created = (await create(watched_client)).json()["data"]
    await eventually(lambda: notifies(statements) > 0)  # Then it is prepared.
    unknown = uuid_of(new_request_id())
    calls = [
        ("event", issuer.token(), 200, 1),
        (f"request/{created['uuid']}", issuer.token(), 200, 1),
        (f"request/{created['uuid']}/events", issuer.token(), 200, 2),
        (f"request/{created['uuid']}", created["secret"], 200, 1),
        (f"request/{created['uuid']}", "A" * 43, 401, 1),
        (f"request/{unknown}", created["secret"], 401, 1),
        (f"request/{unknown}", "A" * 42, 401, 0),
        ("request/req_", "A" * 43, 401, 0),
    ]
    for path, token, status, cost in calls:
        headers = bearer(token)
        await watched_client.get(f"/v1/{path}", headers=headers)
        statements.clear()
        for _ in range(3):
            response = await watched_client.get(f"/v1/{path}", headers=headers)
            assert response.status_code == status
        assert len(of_requests(statements)) == round_trips_of_requests(statements) == 3 * cost


async def test_create_writes_little_wal(database):
    written = []
    for _ in range(_CALLS):
        statement = subjects.create_statement()
        before = await database.fetchval("SELECT pg_current_wal_insert_lsn()")
        await database.execute(statement.text, *statement.arguments)
        after = "SELECT pg_current_wal_insert_lsn() - $1::pg_lsn"
        written.append(await database.fetchval(after, before))

    # The minimum: sometimes a page is split, or written in full after a checkpoint.
    assert min(written) <= _MOST_WAL_BYTES
