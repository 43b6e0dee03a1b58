"""The relay loses no event, keeps the order within a request, and charges no event for an outage."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC
from typing import Any

import asyncpg
import msgspec
import pytest
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from structlog.testing import capture_logs

from deploy.local.machine.ports import free_port
from service.calculation_requests.model import CalculationRequest
from service.outbox import events
from service.outbox.lanes import LANES, lane_of, notify
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool, open_pool
from tests.harness.databases import has_waiting_statement
from tests.harness.examples import CONVEYANCER
from tests.harness.in_process import running
from tests.harness.metrics import rises
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import (
    ANY_EVENT,
    TRACEPARENT,
    announce_next,
    bind_tap,
    created_event,
    open_publisher,
    passes,
    settings_with,
    store,
    take,
    take_all,
    take_ids,
)
from tests.worker.deliveries import calculate
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BrokerUnavailable
from worker.relay.lanes import lock_lanes
from worker.relay.listener import Listener
from worker.relay.loop import Relay
from worker.relay.outbox import LaneLost
from worker.relay.publisher import Publisher
from worker.settings import WorkerSettings

LANE = 0
NEVER = asyncio.Event()


MakeRelay = Callable[..., Relay]


@pytest.fixture
def relay_with(worker_settings: WorkerSettings, pool: Pool) -> MakeRelay:
    """Makes relays with changed settings."""

    def make(**changes: Any) -> Relay:
        return Relay(settings_with(worker_settings, **changes), pool, asyncio.Event())

    return make


async def into_one_lane(database: Connection) -> None:
    """Move all events of the outbox to one lane, so that they can share a window."""
    await database.execute("UPDATE outbox SET lane = $1", LANE)


async def unroute(channel: AbstractChannel) -> None:
    """Leave request.created without a queue until `route`."""
    await channel.queue_delete(topology.NOTIFICATIONS.name)


async def route(channel: AbstractChannel) -> None:
    """Give request.created its queue back."""
    await topology.declare(channel)


class RefusingQueue(msgspec.Struct):
    """A queue of another team that refuses request.created, and a tap that takes it."""

    full: AbstractQueue
    tap: AbstractQueue

    async def mend(self) -> None:
        """End the refusals."""
        await self.full.delete(if_empty=False)


@pytest.fixture
async def refusing(channel: AbstractChannel, tap: AbstractQueue) -> RefusingQueue:
    """A queue that refuses request.created, while notifications and the tap take it."""
    return RefusingQueue(await bind_full_queue(channel, "request.created"), tap)


async def bind_full_queue(channel: AbstractChannel, routing_key: str) -> AbstractQueue:
    """Bind a full queue: the broker refuses events with this key, and other queues still get them."""
    full = await bind_tap(channel, routing_key, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    await channel.default_exchange.publish(Message(b""), full.name)
    return full


async def waiting_events(database: Connection) -> int:
    """Return how many events are still to be delivered."""
    total: int = await database.fetchval(
        "SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM outbox_held)"
    )
    return total


async def make_due(database: Connection) -> None:
    """Make every held event due."""
    await database.execute("UPDATE outbox_held SET next_attempt_at = now() WHERE parked_at IS NULL")


def event_id(request: CalculationRequest, event_type: str = "request.created", sequence: int = 1) -> str:
    """Return the expected id of an event."""
    return f"{request.uuid}.{event_type}.{sequence}"


def in_order(messages: list[AbstractIncomingMessage]) -> dict[str, list[int]]:
    """Return the sequence numbers of each request in the order of arrival, without repeats."""
    sequences: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        data = msgspec.json.decode(message.body)["data"]
        if data["sequence"] not in sequences[data["uuid"]]:
            sequences[data["uuid"]].append(data["sequence"])
    return sequences


async def test_event_is_published_as_a_persistent_cloud_event_with_its_id_as_message_id(
    relay: Relay, publisher: Publisher, database: Connection, tap: AbstractQueue
) -> None:
    request = await store(database, traceparent=TRACEPARENT)
    row = await database.fetchrow("SELECT payload, created_at FROM outbox")

    await relay.relay_due(publisher, NEVER)

    message = await take(tap)
    assert message is not None
    assert row is not None
    assert message.routing_key == "request.created"
    assert message.message_id == event_id(request)
    assert message.type == "request.created"
    assert message.content_type == "application/cloudevents+json"
    assert message.delivery_mode == DeliveryMode.PERSISTENT
    assert message.timestamp == row["created_at"].astimezone(UTC).replace(microsecond=0)
    assert message.body == row["payload"]
    assert message.headers == {
        "cloudEvents:specversion": "1.0",
        "cloudEvents:id": event_id(request),
        "cloudEvents:source": "/calculation-requests",
        "cloudEvents:type": "request.created",
        "cloudEvents:subject": request.uuid,
        "traceparent": TRACEPARENT,
        "sequence": 1,
    }


async def test_event_body_has_no_personal_data_and_no_secret(
    relay: Relay, publisher: Publisher, database: Connection, tap: AbstractQueue
) -> None:
    request = await store(database, external_id="case-7", notes="Beware of the dog", meta_data='{"a":"b"}')

    await relay.relay_due(publisher, NEVER)

    message = await take(tap)
    assert message is not None
    assert msgspec.json.decode(message.body)["data"] == {
        "uuid": request.uuid,
        "tenant": CONVEYANCER,
        "request_type": "SDLT_CALCULATION",
        "property_value": 300_000,
        "calculation_fee_exempt": False,
        "external_id": "case-7",
        "sequence": 1,
    }


async def test_event_is_deleted_once_it_is_confirmed(
    relay: Relay, publisher: Publisher, database: Connection, stored_request: CalculationRequest
) -> None:
    moved = await relay.relay_lanes(publisher, [lane_of(stored_request.id)])

    assert moved == 1
    assert await waiting_events(database) == 0


async def test_second_event_of_a_request_waits_for_the_confirm_of_the_first(
    relay: Relay,
    publisher: Publisher,
    database: Connection,
    tap: AbstractQueue,
    stored_request: CalculationRequest,
) -> None:
    await announce_next(database, stored_request.id)
    lane = lane_of(stored_request.id)

    first_pass = await relay.relay_lanes(publisher, [lane]), await take_ids(tap)
    second_pass = await relay.relay_lanes(publisher, [lane]), await take_ids(tap)

    assert first_pass == (1, [event_id(stored_request)])
    assert second_pass == (1, [event_id(stored_request, "request.email_sent", 2)])


async def test_events_of_different_requests_of_a_lane_share_a_window(
    relay: Relay, publisher: Publisher, database: Connection, tap: AbstractQueue
) -> None:
    requests = [await store(database) for _ in range(5)]
    await into_one_lane(database)

    moved = await relay.relay_lanes(publisher, [LANE])

    assert moved == 5
    assert await take_ids(tap) == [event_id(request) for request in requests]


async def test_window_is_no_larger_than_the_batch_size(
    relay_with: MakeRelay, publisher: Publisher, database: Connection
) -> None:
    for _ in range(5):
        await store(database)
    await into_one_lane(database)
    relay = relay_with(relay_batch_size=2)

    passes_made = [await relay.relay_lanes(publisher, [LANE]) for _ in range(4)]

    assert passes_made == [2, 2, 1, 0]


async def test_event_that_is_committed_late_is_not_passed_over(
    relay: Relay, publisher: Publisher, database: Connection, database_url: str, tap: AbstractQueue
) -> None:
    late_connection = await asyncpg.connect(database_url)
    late_transaction = late_connection.transaction()
    await late_transaction.start()
    late = await store(late_connection)
    early = await store(database)
    await database.execute("UPDATE outbox SET lane = $1", lane_of(late.id))

    for _ in range(5):
        await relay.relay_lanes(publisher, [lane_of(late.id)])
    await late_transaction.commit()
    await late_connection.close()
    await relay.relay_due(publisher, NEVER)

    assert await take_ids(tap) == [event_id(early), event_id(late)]


async def test_event_of_a_slow_commit_on_an_idle_database_is_not_passed_over(
    relay: Relay, publisher: Publisher, database_url: str
) -> None:
    late_connection = await asyncpg.connect(database_url)
    late_transaction = late_connection.transaction()
    await late_transaction.start()
    await store(late_connection)

    for _ in range(8):
        await relay.relay_due(publisher, NEVER)
    await late_transaction.commit()
    await late_connection.close()

    assert await relay.relay_due(publisher, NEVER) == 1


async def test_event_whose_id_was_given_out_before_the_first_write_is_not_passed_over(
    relay: Relay,
    publisher: Publisher,
    database: Connection,
    database_url: str,
    stored_request: CalculationRequest,
) -> None:
    """A transaction gets an id at its first write. Without one, relays cannot know that it is open."""
    await database.execute("SELECT pg_advisory_lock(1)")
    late_connection = await asyncpg.connect(database_url)
    writing = asyncio.create_task(
        late_connection.execute(
            """
            INSERT INTO outbox (lane, request_id, type, sequence, payload)
            VALUES (0, $1, 'request.calculated', 2, convert_to(pg_advisory_xact_lock(1)::text, 'UTF8'))
            """,
            stored_request.id,
        )
    )
    await eventually(lambda: has_waiting_statement(database))

    for _ in range(8):
        await relay.relay_due(publisher, NEVER)
    await database.execute("SELECT pg_advisory_unlock(1)")
    await writing
    await late_connection.close()

    assert await relay.relay_due(publisher, NEVER) == 1


async def test_lane_that_another_relay_has_locked_is_left_alone(
    relay: Relay, publisher: Publisher, database: Connection, stored_request: CalculationRequest
) -> None:
    lane = lane_of(stored_request.id)

    async with database.transaction():
        assert (await lock_lanes(database, [lane])).lanes
        moved_meanwhile = await relay.relay_lanes(publisher, [lane])
    moved_afterwards = await relay.relay_lanes(publisher, [lane])

    assert (moved_meanwhile, moved_afterwards) == (0, 1)


async def test_returned_event_is_held_with_its_error_and_the_time_of_the_next_attempt(
    relay_with: MakeRelay,
    publisher: Publisher,
    database: Connection,
    channel: AbstractChannel,
    stored_request: CalculationRequest,
) -> None:
    await unroute(channel)

    await relay_with(relay_retry_seconds=60.0).relay_due(publisher, NEVER)

    held = await database.fetchrow("SELECT *, next_attempt_at > now() AS waits FROM outbox_held")
    assert held is not None
    assert held["request_id"] == stored_request.id
    assert held["attempts"] == 1
    assert held["last_error"] == "returned: no queue is bound for it"
    assert held["parked_at"] is None
    assert held["waits"]
    assert await database.fetchval("SELECT count(*) FROM outbox") == 0


async def test_refused_event_and_those_behind_it_are_logged_with_the_uuid_and_the_trace_of_their_request(
    relay: Relay, publisher: Publisher, database: Connection, channel: AbstractChannel
) -> None:
    request = await store(database, traceparent=TRACEPARENT)
    await unroute(channel)

    with capture_logs() as logs:
        await relay.relay_due(publisher, NEVER)
        await announce_next(database, request.id, traceparent=TRACEPARENT)
        await relay.relay_due(publisher, NEVER)
        await route(channel)
        await make_due(database)
        await relay.relay_due(publisher, NEVER)

    story = [line for line in logs if "event_id" in line]
    assert [
        (line["event"], line["event_id"]) for line in story if line["event"] != "event_not_published"
    ] == [
        ("event_held", event_id(request, "request.email_sent", 2)),
        ("held_event_published", event_id(request)),
    ]
    assert story[0]["event"] == "event_not_published"
    assert {line["uuid"] for line in story} == {request.uuid}
    assert {line["trace_id"] for line in story} == {TRACEPARENT.split("-")[1]}


async def test_later_events_of_a_request_wait_behind_the_held_one(
    relay_with: MakeRelay,
    publisher: Publisher,
    database: Connection,
    channel: AbstractChannel,
    tap: AbstractQueue,
) -> None:
    relay = relay_with(relay_retry_seconds=60.0)
    request = await store(database)
    await tap.unbind(topology.REQUESTS, ANY_EVENT)
    await unroute(channel)
    await tap.bind(topology.REQUESTS, "request.email_sent")
    await relay.relay_due(publisher, NEVER)

    await announce_next(database, request.id)
    await announce_next(database, request.id)
    await relay.relay_due(publisher, NEVER)

    assert await take_ids(tap) == []
    assert await database.fetch("SELECT sequence, attempts FROM outbox_held ORDER BY id") == [
        (1, 1),
        (2, 0),
        (3, 0),
    ]


async def test_other_requests_of_the_lane_are_published_while_one_is_held(
    relay_with: MakeRelay,
    publisher: Publisher,
    database: Connection,
    channel: AbstractChannel,
    tap: AbstractQueue,
) -> None:
    relay = relay_with(relay_retry_seconds=60.0)
    request = await store(database)
    await tap.unbind(topology.REQUESTS, ANY_EVENT)
    await unroute(channel)
    await relay.relay_due(publisher, NEVER)
    await route(channel)
    await tap.bind(topology.REQUESTS, ANY_EVENT)

    other = await store(database)
    await database.execute("UPDATE outbox SET lane = $1", lane_of(request.id))
    await relay.relay_lanes(publisher, [lane_of(request.id)])

    assert await take_ids(tap) == [event_id(other)]
    assert await database.fetchval("SELECT request_id FROM outbox_held") == request.id


async def test_held_events_are_delivered_in_order_once_they_are_due_and_the_queue_is_back(
    relay: Relay, publisher: Publisher, database: Connection, channel: AbstractChannel, tap: AbstractQueue
) -> None:
    request = await store(database)
    await tap.unbind(topology.REQUESTS, ANY_EVENT)
    await unroute(channel)
    await announce_next(database, request.id)
    await announce_next(database, request.id)
    while await database.fetchval("SELECT count(*) FROM outbox"):
        await relay.relay_due(publisher, NEVER)
    await route(channel)
    await tap.bind(topology.REQUESTS, ANY_EVENT)

    async def delivered() -> bool:
        await make_due(database)
        await relay.relay_due(publisher, NEVER)
        return await waiting_events(database) == 0

    await eventually(delivered)

    assert in_order(await take_all(tap)) == {request.uuid: [1, 2, 3]}


async def test_event_behind_a_refused_one_is_due_once_the_refused_one_is_delivered(
    relay_with: MakeRelay, publisher: Publisher, database: Connection, refusing: RefusingQueue
) -> None:
    relay = relay_with(relay_retry_seconds=0.0001, relay_longest_retry_seconds=0.0001)
    request = await store(database)
    for _ in range(3):
        await announce_next(database, request.id)
        await relay.relay_due(publisher, NEVER)
    waits = "SELECT count(*) FROM outbox_held WHERE next_attempt_at = 'infinity'"
    assert await database.fetchval(waits) == 3

    await refusing.mend()
    for _ in range(4):
        assert await relay.relay_due(publisher, NEVER) == 1

    assert list(dict.fromkeys(await take_ids(refusing.tap))) == [
        event_id(request),
        *(event_id(request, "request.email_sent", sequence) for sequence in (2, 3, 4)),
    ]


async def test_event_held_in_the_pass_that_delivers_the_one_before_it_does_not_wait_for_ever(
    relay_with: MakeRelay, publisher: Publisher, database: Connection, refusing: RefusingQueue
) -> None:
    relay = relay_with(relay_retry_seconds=0.0001, relay_longest_retry_seconds=0.0001)
    request = await store(database)
    await relay.relay_due(publisher, NEVER)
    await refusing.mend()
    await announce_next(database, request.id)

    moved = [await relay.relay_due(publisher, NEVER) for _ in range(3)]

    assert moved == [2, 1, 0]
    assert await waiting_events(database) == 0


async def test_wait_of_a_refused_event_doubles_up_to_the_longest(
    relay_with: MakeRelay,
    publisher: Publisher,
    database: Connection,
    channel: AbstractChannel,
    stored_request: CalculationRequest,
) -> None:
    await unroute(channel)
    pauses = []

    for _ in range(4):
        relay = relay_with(relay_retry_seconds=100.0, relay_longest_retry_seconds=300.0)
        await make_due(database)
        await relay.relay_lanes(publisher, [lane_of(stored_request.id)])
        pause = "SELECT extract(epoch FROM next_attempt_at - now())::float FROM outbox_held"
        pauses.append(round(await database.fetchval(pause), -1))

    assert pauses == [100, 200, 300, 300]


async def test_refused_event_is_never_parked(
    relay_with: MakeRelay, publisher: Publisher, database: Connection, refusing: RefusingQueue
) -> None:
    """The fault may lie with the queue of another team, and concern every event."""
    relay = relay_with(relay_retry_seconds=0.0001, relay_longest_retry_seconds=0.0001)
    request = await store(database)

    for _ in range(30):
        await relay.relay_due(publisher, NEVER)
    held = await database.fetchrow("SELECT attempts > 10 AS many, parked_at FROM outbox_held")
    await refusing.mend()
    await eventually(lambda: relay.relay_due(publisher, NEVER))

    assert held == (True, None)
    assert set(await take_ids(refusing.tap)) == {event_id(request)}
    assert await waiting_events(database) == 0


async def test_while_refusals_go_on_one_refused_event_is_retried_at_a_time_and_new_ones_at_once(
    relay_with: MakeRelay, publisher: Publisher, database: Connection, refusing: RefusingQueue
) -> None:
    """Each attempt puts one more copy into every queue that takes the event."""
    relay = relay_with(relay_retry_seconds=3600.0, relay_longest_retry_seconds=3600.0)
    requests = [await store(database) for _ in range(5)]
    while await relay.relay_due(publisher, NEVER):
        pass
    copies_at_first = await take_ids(refusing.tap)

    await make_due(database)
    new = await store(database)
    for _ in range(5):
        await relay.relay_due(publisher, NEVER)
    copies = await take_ids(refusing.tap)

    assert set(copies_at_first) == {event_id(request) for request in requests}
    assert len(copies_at_first) == 5
    assert copies.count(event_id(new)) == 1
    assert len(copies) == 2


async def test_refused_events_are_retried_in_turn(
    relay_with: MakeRelay, publisher: Publisher, database: Connection, refusing: RefusingQueue
) -> None:
    relay = relay_with(relay_retry_seconds=0.0001, relay_longest_retry_seconds=0.0001)
    requests = [await store(database) for _ in range(3)]
    await into_one_lane(database)

    for _ in range(1 + 3 * 2):
        await relay.relay_lanes(publisher, [LANE])

    copies = await take_ids(refusing.tap)
    assert copies[:3] == [event_id(request) for request in requests]
    assert copies[3:] == [event_id(request) for request in requests] * 2


async def test_first_confirmed_retry_lifts_the_limit_on_retries(
    relay_with: MakeRelay, publisher: Publisher, database: Connection, refusing: RefusingQueue
) -> None:
    relay = relay_with(relay_retry_seconds=3600.0, relay_held_batch_size=20)
    for _ in range(30):
        await store(database)
    await into_one_lane(database)
    await relay.relay_lanes(publisher, [LANE])
    await refusing.mend()
    await make_due(database)

    moved = [await relay.relay_lanes(publisher, [LANE]) for _ in range(4)]

    assert moved == [1, 20, 9, 0]


async def test_first_confirmed_retry_makes_all_refused_events_due(
    relay_with: MakeRelay, publisher: Publisher, database: Connection, refusing: RefusingQueue
) -> None:
    """Otherwise a queue that has recovered would get the last of them minutes later."""
    relay = relay_with(relay_retry_seconds=3600.0, relay_held_batch_size=1)
    parked, *_ = [await store(database) for _ in range(10)]
    while await relay.relay_due(publisher, NEVER):
        pass
    await refusing.mend()
    await database.execute("UPDATE outbox_held SET parked_at = now() WHERE request_id = $1", parked.id)
    await database.execute(
        """
        UPDATE outbox_held
           SET next_attempt_at = now()
         WHERE id = (SELECT max(id) FROM outbox_held)
        """
    )

    while await relay.relay_due(publisher, NEVER):
        pass

    held = await database.fetch("SELECT request_id, next_attempt_at > now() AS later FROM outbox_held")
    assert [tuple(row) for row in held] == [(parked.id, True)]


async def test_event_that_waited_behind_a_refused_one_is_published_at_once_while_others_are_refused(
    relay_with: MakeRelay, publisher: Publisher, database: Connection, channel: AbstractChannel
) -> None:
    """It was not refused itself. In one lane, the refused events would otherwise fill every batch."""
    relay = relay_with(relay_retry_seconds=3600.0, relay_held_batch_size=2)
    refusing_created = await bind_full_queue(channel, "request.created")
    refusing_sent = await bind_full_queue(channel, "request.email_sent")
    requests = [await store(database) for _ in range(10)]
    for request in requests:
        await announce_next(database, request.id)
    await database.execute("UPDATE outbox SET type = 'request.calculated' WHERE sequence = 2")
    for _ in range(5):
        refused = await store(database)
        await database.execute(
            "UPDATE outbox SET type = 'request.email_sent' WHERE request_id = $1", refused.id
        )
    await into_one_lane(database)
    await relay.relay_lanes(publisher, [LANE])
    await refusing_created.delete(if_empty=False)
    await database.execute("UPDATE outbox_held SET next_attempt_at = now() WHERE attempts > 0")

    while await relay.relay_lanes(publisher, [LANE]):
        pass

    held = await database.fetch("SELECT DISTINCT type FROM outbox_held")
    assert [row["type"] for row in held] == ["request.email_sent"]
    await refusing_sent.delete(if_empty=False)


async def test_confirm_of_a_new_event_does_not_end_the_wait_of_a_refused_one(
    relay_with: MakeRelay, publisher: Publisher, database: Connection, refusing: RefusingQueue
) -> None:
    """A queue may refuse one event for ever, which must not put a copy a second into every other queue."""
    relay = relay_with(relay_retry_seconds=3600.0)
    await store(database)
    await relay.relay_due(publisher, NEVER)
    await refusing.mend()
    await store(database)

    for _ in range(3):
        await relay.relay_due(publisher, NEVER)

    assert await database.fetchval("SELECT attempts FROM outbox_held WHERE next_attempt_at > now()") == 1


async def test_queue_that_refuses_other_types_does_not_delay_request_created(
    relay_with: MakeRelay,
    publisher: Publisher,
    database: Connection,
    channel: AbstractChannel,
    tap: AbstractQueue,
) -> None:
    relay = relay_with(relay_retry_seconds=0.0001, relay_longest_retry_seconds=0.0001)
    await bind_full_queue(channel, "request.email_sent")
    for _ in range(40):
        request = await store(database)
        await database.execute(
            "UPDATE outbox SET type = 'request.email_sent' WHERE request_id = $1", request.id
        )
    await into_one_lane(database)
    await relay.relay_lanes(publisher, [LANE])
    full = await bind_full_queue(channel, "request.created")
    created = [await store(database) for _ in range(10)]
    await into_one_lane(database)
    await relay.relay_lanes(publisher, [LANE])
    await full.delete(if_empty=False)
    await take_all(tap)

    for _ in range(4):
        await relay.relay_lanes(publisher, [LANE])

    assert {event_id(request) for request in created} < set(await take_ids(tap))
    assert await database.fetchval("SELECT count(*) FROM outbox_held") == 40


async def test_event_that_cannot_be_encoded_is_parked_at_once_and_later_ones_of_its_request_wait(
    relay: Relay, publisher: Publisher, database: Connection, tap: AbstractQueue
) -> None:
    request = await store(database)
    await announce_next(database, request.id)
    await database.execute("UPDATE outbox SET type = repeat('x', 300) WHERE sequence = 1")

    for _ in range(3):
        await make_due(database)
        await relay.relay_due(publisher, NEVER)

    held = await database.fetch("SELECT attempts, parked_at IS NOT NULL FROM outbox_held ORDER BY id")
    assert held == [(1, True), (0, False)]
    assert await take_ids(tap) == []


async def test_event_without_a_queue_counts_as_delivered_unless_it_must_be_routed(
    relay: Relay, publisher: Publisher, database: Connection, stored_request: CalculationRequest
) -> None:
    await relay.relay_due(publisher, NEVER)
    await calculate(database, stored_request.uuid, "calc-1")

    await relay.relay_due(publisher, NEVER)

    assert await waiting_events(database) == 0


async def test_event_that_cannot_be_encoded_does_not_affect_the_others(
    relay: Relay, publisher: Publisher, database: Connection, tap: AbstractQueue
) -> None:
    before, broken, after = [await store(database) for _ in range(3)]
    await database.execute("UPDATE outbox SET type = $2 WHERE request_id = $1", broken.id, "x" * 300)
    await into_one_lane(database)

    await relay.relay_lanes(publisher, [LANE])

    assert await take_ids(tap) == [event_id(before), event_id(after)]
    held = await database.fetchrow("SELECT request_id, attempts, last_error, parked_at FROM outbox_held")
    assert held is not None
    assert (held["request_id"], held["attempts"]) == (broken.id, 1)
    assert held["parked_at"] is not None
    assert held["last_error"].startswith("unencodable")


async def test_confirms_are_matched_to_the_right_events_beside_events_that_cannot_be_encoded(
    relay: Relay, publisher: Publisher, database: Connection, channel: AbstractChannel, tap: AbstractQueue
) -> None:
    requests = [await store(database) for _ in range(6)]
    for request in requests[::2]:
        await database.execute("UPDATE outbox SET type = $2 WHERE request_id = $1", request.id, "x" * 300)
    await tap.unbind(topology.REQUESTS, ANY_EVENT)
    await unroute(channel)
    await into_one_lane(database)
    await relay.relay_lanes(publisher, [LANE])
    await route(channel)
    await tap.bind(topology.REQUESTS, ANY_EVENT)

    for _ in range(2):  # The first pass retries one event, to see whether refusals go on.
        await make_due(database)
        await relay.relay_lanes(publisher, [LANE])

    assert sorted(await take_ids(tap), key=str) == sorted(event_id(request) for request in requests[1::2])
    left = await database.fetch("SELECT request_id FROM outbox_held ORDER BY id")
    assert [row["request_id"] for row in left] == [request.id for request in requests[::2]]


async def test_two_relays_deliver_every_event_once_and_in_order(
    worker_settings: WorkerSettings, database: Connection, tap: AbstractQueue
) -> None:
    requests = [await store(database) for _ in range(10)]
    settings = settings_with(worker_settings, relay_batch_size=7)
    async with AsyncExitStack() as resources:
        pools = [await resources.enter_async_context(open_pool(settings)) for _ in range(2)]
        relays = [Relay(settings, pool, asyncio.Event()) for pool in pools]

        async with running(*(relay.run for relay in relays)):
            for _ in range(20):
                for request in requests:
                    await announce_next(database, request.id)
            await eventually(lambda: _is_empty(database))

    messages = await take_all(tap)
    assert len(messages) == 10 * 21
    assert in_order(messages) == {request.uuid: list(range(1, 22)) for request in requests}


async def _is_empty(database: Connection) -> bool:
    return await waiting_events(database) == 0


async def test_outage_of_the_broker_charges_no_attempt_and_delivery_resumes_after_it(
    relay_with: MakeRelay,
    broker_link: TcpProxy,
    database: Connection,
    tap: AbstractQueue,
    stored_request: CalculationRequest,
) -> None:
    relay = relay_with(amqp_url=broker_link.url)
    await broker_link.refuse()

    async with running(relay.run):
        await eventually(lambda: broker_link.refused >= 3)
        was_ready = await passes(relay.check)
        held = await database.fetchval("SELECT count(*) FROM outbox_held")
        waiting = await waiting_events(database)
        broker_link.admit()
        await eventually(lambda: _is_empty(database))
        is_ready = await passes(relay.check)

    assert (was_ready, held, waiting, is_ready) == (False, 0, 1, True)
    assert await take_ids(tap) == [event_id(stored_request)]


async def test_address_without_a_broker_is_an_outage(worker_settings: WorkerSettings, pool: Pool) -> None:
    url = f"amqp://guest:guest@127.0.0.1:{free_port()}/"
    settings = settings_with(worker_settings, amqp_url=url)

    with pytest.raises(BrokerUnavailable):
        async with open_publisher(settings):
            pass

    assert not await passes(Relay(settings, pool, asyncio.Event()).check)


async def test_connection_cut_repeatedly_loses_and_reorders_nothing(
    relay_with: MakeRelay, broker_link: TcpProxy, database: Connection, tap: AbstractQueue
) -> None:
    requests = [await store(database) for _ in range(5)]
    for _ in range(10):
        for request in requests:
            await announce_next(database, request.id)
    relay = relay_with(amqp_url=broker_link.url, relay_batch_size=5)
    messages: list[AbstractIncomingMessage] = []

    async with running(relay.run):
        for _ in range(4):
            await eventually(lambda: take_more(tap, messages))
            await broker_link.cut()
        await eventually(lambda: _is_empty(database))

    messages += await take_all(tap)
    assert in_order(messages) == {request.uuid: list(range(1, 12)) for request in requests}
    assert await database.fetchval("SELECT count(*) FROM outbox_held") == 0


async def take_more(tap: AbstractQueue, messages: list[AbstractIncomingMessage]) -> bool:
    """Take the messages that have arrived. True if there were any, or none is missing."""
    messages += (taken := await take_all(tap))
    return bool(taken) or len(messages) >= 55


async def publishing_under_way(database: Connection) -> bool:
    """Whether a relay has read a window and not yet settled it."""
    return bool(
        await database.fetchval(
            """
            SELECT count(*)
              FROM pg_stat_activity
             WHERE datname = current_database()
               AND state = 'idle in transaction'
               AND query LIKE '%FROM outbox_held AS candidate%'
            """
        )
    )


async def test_row_deleted_by_another_process_is_a_lost_lane_and_nothing_is_settled(
    worker_settings: WorkerSettings, relay: Relay, broker_link: TcpProxy, database: Connection
) -> None:
    kept, gone = await store(database), await store(database)
    await into_one_lane(database)

    async with open_publisher(settings_with(worker_settings, amqp_url=broker_link.url)) as publisher:
        broker_link.hold()
        relaying = asyncio.create_task(relay.relay_lanes(publisher, [LANE]))
        await eventually(lambda: publishing_under_way(database))
        await database.execute("DELETE FROM outbox WHERE request_id = $1", gone.id)
        broker_link.resume()
        with pytest.raises(LaneLost):
            await relaying

    assert await database.fetchval("SELECT request_id FROM outbox") == kept.id


async def test_connection_to_postgres_lost_while_publishing_settles_nothing(
    worker_settings: WorkerSettings,
    relay: Relay,
    broker_link: TcpProxy,
    database: Connection,
    tap: AbstractQueue,
) -> None:
    request = await store(database)
    lane = lane_of(request.id)
    async with open_publisher(settings_with(worker_settings, amqp_url=broker_link.url)) as publisher:
        broker_link.hold()
        relaying = asyncio.create_task(relay.relay_lanes(publisher, [lane]))
        await eventually(lambda: publishing_under_way(database))
        await database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction'"
            " AND datname = current_database()"
        )
        broker_link.resume()
        with pytest.raises(PostgresUnavailable):
            await relaying

        await relay.relay_lanes(publisher, [lane])

    assert await take_ids(tap) == [event_id(request)] * 2
    assert await waiting_events(database) == 0


async def test_nothing_is_published_from_a_read_only_postgres(
    relay: Relay,
    publisher: Publisher,
    database: Connection,
    tap: AbstractQueue,
    stored_request: CalculationRequest,
) -> None:
    """It could settle nothing, and every pass would publish the same events again."""
    name = await database.fetchval("SELECT quote_ident(current_database())")
    await database.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")

    with pytest.raises(PostgresUnavailable):
        await relay.relay_due(publisher, NEVER)

    assert await take_ids(tap) == []
    assert await database.fetchval("SELECT request_id FROM outbox") == stored_request.id


async def test_window_whose_commit_fails_is_published_again(
    relay: Relay,
    publisher: Publisher,
    database: Connection,
    tap: AbstractQueue,
    stored_request: CalculationRequest,
) -> None:
    await database.execute(
        """
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'no commit today' USING ERRCODE = 'admin_shutdown'; END $$;
        CREATE CONSTRAINT TRIGGER fail_at_commit AFTER DELETE ON outbox
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail();
        """
    )
    with pytest.raises(PostgresUnavailable):
        await relay.relay_due(publisher, NEVER)

    await database.execute("DROP TRIGGER fail_at_commit ON outbox")
    await relay.relay_due(publisher, NEVER)

    assert await take_ids(tap) == [event_id(stored_request)] * 2
    assert await waiting_events(database) == 0


async def test_events_confirmed_before_an_outage_are_settled_and_the_rest_stay(
    worker_settings: WorkerSettings, pool: Pool, broker_link: TcpProxy, database: Connection
) -> None:
    confirmed, unconfirmed = await store(database), await store(database)
    await into_one_lane(database)
    settings = settings_with(worker_settings, amqp_url=broker_link.url, broker_timeout_seconds=1.0)
    relay = Relay(settings, pool, asyncio.Event())

    async with open_publisher(settings) as publisher:
        broker_link.hold_before(event_id(unconfirmed).encode())
        with pytest.raises(BrokerUnavailable):
            await relay.relay_lanes(publisher, [LANE])
        broker_link.resume()

    left = await database.fetch("SELECT request_id FROM outbox")
    assert [row["request_id"] for row in left] == [unconfirmed.id] != [confirmed.id]
    assert await database.fetchval("SELECT count(*) FROM outbox_held") == 0


async def test_relay_keeps_working_after_an_outage_of_postgres(
    worker_settings: WorkerSettings, postgres_link: TcpProxy, database: Connection, tap: AbstractQueue
) -> None:
    settings = settings_with(worker_settings, database_url=postgres_link.url)
    async with open_pool(settings) as pool, running(Relay(settings, pool, asyncio.Event()).run):
        first = await store(database)
        await eventually(lambda: _is_empty(database))
        await postgres_link.refuse()
        second = await store(database)
        await eventually(lambda: postgres_link.refused >= 3)
        postgres_link.admit()
        await eventually(lambda: _is_empty(database))

    assert await take_ids(tap) == [event_id(first), event_id(second)]


async def test_woken_relay_does_not_wait_for_its_next_poll(
    worker_settings: WorkerSettings, pool: Pool, database: Connection, tap: AbstractQueue
) -> None:
    settings = settings_with(worker_settings, relay_poll_seconds=3600.0)
    woken = asyncio.Event()
    relay = Relay(settings, pool, woken)

    async with running(relay.run, Listener(settings, woken).run):
        await eventually(lambda: passes(relay.check))
        request = await store(database)
        await notify(database)
        await eventually(lambda: _is_empty(database))

    assert await take_ids(tap) == [event_id(request)]


async def test_stopped_relay_leaves_unpublished_events(
    relay: Relay, publisher: Publisher, database: Connection, stored_request: CalculationRequest
) -> None:
    stop = asyncio.Event()
    stop.set()

    moved = await relay.relay_due(publisher, stop)

    assert moved == 0
    assert await database.fetchval("SELECT request_id FROM outbox") == stored_request.id


async def test_event_is_not_stored_without_its_request(database: Connection) -> None:
    await database.execute("ALTER TABLE outbox ADD CHECK (false) NOT VALID")

    with pytest.raises(asyncpg.CheckViolationError):
        await store(database)

    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 0


async def test_idle_lane_is_read_from_behind_the_deleted_events(
    relay: Relay, publisher: Publisher, database: Connection, stored_request: CalculationRequest
) -> None:
    """Otherwise, while a backup holds an old snapshot, every look would step over all of them."""
    last_id = await outbox_id(database, stored_request)

    for _ in range(8):
        await relay.relay_due(publisher, NEVER)

    assert relay.marks.low_water == [last_id + 1] * LANES


async def test_event_below_the_marks_is_found_in_the_end(
    worker_settings: WorkerSettings,
    pool: Pool,
    publisher: Publisher,
    database: Connection,
    stored_request: CalculationRequest,
) -> None:
    relay = Relay(worker_settings, pool, asyncio.Event(), look_back_seconds=0.2)
    for _ in range(8):
        await relay.relay_due(publisher, NEVER)
    event = events.encode(created_event(stored_request), time=stored_request.created_at, traceparent=None)
    await database.execute(
        """
        INSERT INTO outbox (lane, id, request_id, type, sequence, payload) OVERRIDING SYSTEM VALUE
        VALUES ($1, 0, $2, 'request.created', 1, $3)
        """,
        lane_of(stored_request.id),
        stored_request.id,
        event,
    )

    async def is_found() -> bool:
        return await relay.relay_due(publisher, NEVER) == 1

    with rises("relay_lanes_passed_over_total"):
        await eventually(is_found)


async def test_events_are_read_after_ids_were_set_back_without_an_error(
    relay: Relay, publisher: Publisher, database: Connection
) -> None:
    """As after a failover that lost the last commits, behind a pooler that hid it."""
    for _ in range(3):
        await store(database)
    for _ in range(8):
        await relay.relay_due(publisher, NEVER)
    assert relay.marks.low_water == [4] * LANES
    await database.execute("ALTER SEQUENCE outbox_id_seq RESTART")
    await store(database)

    moved = [await relay.relay_due(publisher, NEVER) for _ in range(2)]

    assert sum(moved) == 1


async def outbox_id(database: Connection, request: CalculationRequest) -> int:
    found: int = await database.fetchval("SELECT id FROM outbox WHERE request_id = $1", request.id)
    return found


async def test_events_of_many_lanes_share_a_window(
    relay: Relay, publisher: Publisher, database: Connection
) -> None:
    for _ in range(40):
        await store(database)

    moved = await relay.relay_lanes(publisher, range(LANES))

    assert moved == 40
    assert await database.fetchval("SELECT count(*) FROM outbox") == 0


async def test_lanes_that_another_relay_has_locked_are_left_alone_and_the_others_relayed(
    relay: Relay, publisher: Publisher, database: Connection, stored_request: CalculationRequest
) -> None:
    lane = lane_of(stored_request.id)
    while lane_of((other := await store(database)).id) == lane:
        await database.execute("DELETE FROM outbox WHERE request_id = $1", other.id)
    async with database.transaction():
        await lock_lanes(database, [lane])
        moved = await relay.relay_lanes(publisher, range(LANES))

    assert moved == 1
    assert await database.fetchval("SELECT request_id FROM outbox") == stored_request.id
