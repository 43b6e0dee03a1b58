"""The reference consumer detects loss, inversion and repeats, and reports nothing else."""

import asyncio
import json
from uuid import UUID

import pytest
from aio_pika.abc import AbstractQueue

from service.postgres.pool import Connection
from tests.worker.conftest import announce_next, store, take_all
from tests.worker.reference_consumer import ReferenceConsumer, Verdict
from worker.relay.loop import Relay
from worker.relay.publisher import Publisher

NEVER = asyncio.Event()


def event(sequence: int, *, uuid: str = "req_a", event_id: str | None = None) -> bytes:
    """Return a minimal event."""
    data = {"uuid": uuid, "sequence": sequence}
    return json.dumps({"id": event_id or f"{uuid}.{sequence}", "data": data}).encode()


@pytest.mark.parametrize(
    ("sequences", "verdicts"),
    [
        ([1, 2, 3], ["new", "new", "new"]),
        ([1, 2, 2, 1, 3], ["new", "new", "repeat", "repeat", "new"]),
        ([1, 3], ["new", "gap"]),
        ([2, 3], ["gap", "new"]),
        ([2, 1], ["gap", "inversion"]),
        ([1, 3, 2, 4], ["new", "gap", "inversion", "new"]),
        ([1, 3, 2, 2], ["new", "gap", "inversion", "repeat"]),
    ],
    ids=str,
)
def test_each_delivery_is_judged(sequences: list[int], verdicts: list[Verdict]) -> None:
    consumer = ReferenceConsumer()

    assert [consumer.take(event(sequence)) for sequence in sequences] == verdicts


def test_requests_are_judged_separately() -> None:
    consumer = ReferenceConsumer()

    verdicts = [consumer.take(event(number, uuid=uuid)) for number in (1, 2) for uuid in ("req_a", "req_b")]

    assert verdicts == ["new"] * 4


def test_two_events_with_the_same_sequence_are_a_conflict() -> None:
    consumer = ReferenceConsumer()

    assert [consumer.take(event(1)), consumer.take(event(1, event_id="other"))] == ["new", "conflict"]


def test_lost_event_is_missing_until_it_arrives() -> None:
    consumer = ReferenceConsumer()
    consumer.take(event(1))
    consumer.take(event(4))

    before = consumer.missing()
    consumer.take(event(2))
    consumer.take(event(3))

    assert before == {"req_a": [2, 3]}
    assert consumer.missing() == {}


def test_loss_of_the_last_event_or_a_whole_request_shows_in_comparison_with_the_outbox() -> None:
    consumer = ReferenceConsumer()
    consumer.take(event(1))

    assert consumer.missing() == {}
    assert consumer.missing({"req_a": 2, "req_b": 1}) == {"req_a": [2], "req_b": [1]}


async def deliver(relay: Relay, publisher: Publisher, tap: AbstractQueue) -> ReferenceConsumer:
    """Relay all pending events, and pass the messages to a consumer."""
    while await relay.relay_due(publisher, NEVER):
        pass
    consumer = ReferenceConsumer()
    for message in await take_all(tap):
        consumer.take(message.body)
    return consumer


async def three_events(database: Connection) -> UUID:
    """Store a request that has two more events."""
    request = await store(database)
    await announce_next(database, request.id)
    await announce_next(database, request.id)
    return request.id


async def written(database: Connection) -> dict[str, int]:
    """Return the number of events of each request, from the payloads in the outbox."""
    rows = await database.fetch("SELECT payload FROM outbox")
    data = [json.loads(row["payload"])["data"] for row in rows]
    return {one["uuid"]: max(d["sequence"] for d in data if d["uuid"] == one["uuid"]) for one in data}


async def test_relay_delivers_without_loss_inversion_or_repeat(
    relay: Relay, publisher: Publisher, database: Connection, tap: AbstractQueue
) -> None:
    for _ in range(5):
        await three_events(database)
    expected = await written(database)

    consumer = await deliver(relay, publisher, tap)

    assert consumer.counts == {"new": 15, "repeat": 0, "gap": 0, "inversion": 0, "conflict": 0}
    assert consumer.missing(expected) == {}


async def test_event_lost_on_the_way_is_missing(
    relay: Relay, publisher: Publisher, database: Connection, tap: AbstractQueue
) -> None:
    await three_events(database)
    expected = await written(database)
    await database.execute("DELETE FROM outbox WHERE sequence = 2")

    consumer = await deliver(relay, publisher, tap)

    assert consumer.counts["gap"] == 1
    assert consumer.missing(expected) == {uuid: [2] for uuid in expected}


async def test_events_swapped_on_the_way_are_an_inversion(
    relay: Relay, publisher: Publisher, database: Connection, tap: AbstractQueue
) -> None:
    await three_events(database)
    await database.execute(
        """
        INSERT INTO outbox (lane, request_id, type, sequence, traceparent, payload)
        SELECT lane, request_id, type, sequence, traceparent, payload
          FROM outbox
         WHERE sequence = 1
        """
    )
    await database.execute("DELETE FROM outbox WHERE id = (SELECT min(id) FROM outbox)")

    consumer = await deliver(relay, publisher, tap)

    assert consumer.counts == {"new": 1, "repeat": 0, "gap": 1, "inversion": 1, "conflict": 0}
    assert consumer.missing() == {}
