"""Requests stored in the statement of the API, with their event, over a connection of the test's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

import msgspec
from asyncpg.transaction import Transaction

from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.errors import InvalidSubmission
from service.api.openapi.examples import FULL_REQUEST
from service.calculation_requests import storing
from service.calculation_requests.changing import change
from service.calculation_requests.model import CalculationRequest, Idempotency
from service.calculation_requests.request_secrets import SecretKeyRing
from service.outbox import asyncapi, events
from service.outbox.events import DetailedRequestEvent, RequestCreated, RequestEvent
from service.postgres.pool import Connection
from tests.harness import databases
from tests.harness.examples import A_REQUEST, CONVEYANCER, SECRET_KEYS

KEYS = SecretKeyRing.parse(SECRET_KEYS)

COLUMNS: dict[str, Any] = {
    **msgspec.convert(A_REQUEST, CreateBody).validated(waiver_applies=False),
    "property_value": 300_000,
}


def _takes_any_text(field: str) -> bool:
    with suppress(InvalidSubmission):
        parse(CreateBody, msgspec.json.encode(FULL_REQUEST | {field: "text"}))
        return True
    return False


ANY_TEXTS = tuple(filter(_takes_any_text, CreateBody.__struct_fields__))  # not e-mail addresses, for instance


def new_request(**columns: Any) -> CalculationRequest:
    return storing.new_request(COLUMNS | columns, conveyancer_id=CONVEYANCER, keys=KEYS)


async def insert(
    connection: Connection,
    request: CalculationRequest,
    *,
    idempotency: Idempotency | None = None,
    traceparent: str | None = None,
) -> bool:
    """Store a request and its request.created; return whether it was stored. Sets the request's times."""
    arguments = storing.insert_arguments(request, idempotency, traceparent)
    row = await connection.fetchrow(storing.INSERT, *arguments)
    if row is not None:
        request.created_at = request.updated_at = row[1]
    return row is not None


def own_examples(event: type[RequestEvent]) -> dict[str, Any]:
    """Return examples of the fields that only events of this type have."""
    examples = asyncapi.examples_in(event)
    return {name: examples[name] for name in examples if name not in DetailedRequestEvent.__struct_fields__}


class RequestAddedLater(RequestEvent, frozen=True, kw_only=True):
    """An event of a type that a later release may add."""

    type: ClassVar[str] = "request.added_later"


async def insert_with_each_event(connection: Connection) -> CalculationRequest:
    """Store a request, and an event of each type and of one that a later release may add."""
    request = new_request()
    await insert(connection, request)
    later: list[type[RequestEvent]] = [*events.SENT, RequestAddedLater]
    later.remove(RequestCreated)
    async with connection.transaction(), change(connection, request.id) as changed:
        for event in later:
            changed.announce(event, **own_examples(event))
    return request


# The events of the outbox, in the order in which they were written.
QUEUED = """
    SELECT request_id, sequence, type, conveyancer_id, time, data, traceparent
      FROM outbox
      JOIN event USING (request_id, sequence)
     ORDER BY created_at, request_id, sequence
"""

# Puts the event $2, a CloudEvent, into the outbox for each of $1 requests that are stored nowhere.
FILL_OUTBOX = """
    WITH kept AS (
        INSERT INTO event (request_id, sequence, type, conveyancer_id, time, data, transaction)
        SELECT gen_random_uuid(), 1, 'request.created', 'acme', now(),
               convert_from($2, 'UTF8')::json -> 'data', pg_current_xact_id()
          FROM generate_series(1, $1::int)
        RETURNING request_id, sequence
    )
    INSERT INTO outbox (request_id, sequence)
    SELECT request_id, sequence
      FROM kept
"""


@asynccontextmanager
async def holding(database_url: str, idempotency: Idempotency | None) -> AsyncIterator[Transaction]:
    """Store a request with this key in a transaction that the caller, or the end of the block, ends."""
    async with databases.connected(database_url) as holder:
        transaction = holder.transaction()
        await transaction.start()
        assert await insert(holder, new_request(), idempotency=idempotency)
        yield transaction


async def count_rows(database: Connection) -> tuple[int, int]:
    counts = "SELECT (SELECT count(*) FROM calculation_request), (SELECT count(*) FROM outbox)"
    ((requests, queued),) = await database.fetch(counts)
    return requests, queued
