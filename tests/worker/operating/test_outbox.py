"""`outbox stats|list|retry|park`: unpublished events are shown, parked and retried while relays run."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aio_pika.abc import AbstractChannel, AbstractQueue

from service.calculation_requests import reading
from service.calculation_requests.model import CalculationRequest
from service.operations import emails, operator_actions
from service.outbox import lanes
from service.postgres.outages import OUTAGE_ERRORS, PostgresUnavailable
from service.postgres.pool import Connection
from tests.harness.databases import has_waiting_statement
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import announce_next, bind_tap, settings_with, store, take_ids
from tests.worker.operating.steps import intend
from tests.worker.operating.test_commands import command
from worker.operating import outbox as operating_outbox
from worker.operating import outbox_statements
from worker.operating.arguments import InvalidArgument
from worker.operating.outbox_statements import EventKey
from worker.rabbitmq import topology
from worker.reconciliation import checks
from worker.reconciliation.checks import Limits
from worker.relay.lanes import lock_lanes
from worker.relay.loop import Relay
from worker.relay.publisher import Publisher
from worker.settings import WorkerSettings

NEVER = asyncio.Event()


def event_id(request: CalculationRequest, event_type: str = "request.created", sequence: int = 1) -> str:
    """Return the id of an event."""
    return f"{request.uuid}.{event_type}.{sequence}"


EVERYTHING = "#"
Deliver = Callable[[], Awaitable[list[str | None]]]


class Routes:
    """The routes of events: to the notifications and to a tap that gets them all, or nowhere when closed."""

    def __init__(self, channel: AbstractChannel, tap: AbstractQueue) -> None:
        self._channel = channel
        self.tap = tap

    async def close(self) -> None:
        """Leave the events without a queue, so that request.created is refused."""
        await self.tap.unbind(topology.REQUESTS, EVERYTHING)
        await self._channel.queue_delete(topology.NOTIFICATIONS.name)

    async def open(self) -> None:
        """Restore the queues."""
        await topology.declare(self._channel)
        await self.tap.bind(topology.REQUESTS, EVERYTHING)


@pytest.fixture
async def routes(channel: AbstractChannel) -> Routes:
    """The routes of events, open."""
    return Routes(channel, await bind_tap(channel, EVERYTHING))


@pytest.fixture
def deliver(relay: Relay, publisher: Publisher, routes: Routes) -> Deliver:
    """Relay until nothing is due, and return the ids of the messages that arrived."""

    async def relay_all() -> list[str | None]:
        while await relay.relay_due(publisher, NEVER):
            pass
        return await take_ids(routes.tap)

    return relay_all


@pytest.fixture
async def refused(routes: Routes, database: Connection, deliver: Deliver) -> CalculationRequest:
    """A request whose request.created was refused once, and whose next event waits behind it."""
    request = await store(database)
    await announce_next(database, request.id)
    await routes.close()
    for _ in range(2):
        await deliver()
    await routes.open()
    return request


async def park_all(database: Connection) -> None:
    """Park the failing events."""
    await database.execute("UPDATE outbox_held SET parked_at = now(), attempts = 10 WHERE attempts > 0")


async def listed(settings: WorkerSettings, *words: str) -> list[Any]:
    """Return the answer of `outbox list`."""
    answer = await command(settings, "outbox", "list", *words)
    assert isinstance(answer.data, list)
    return answer.data


async def test_stats_of_an_empty_outbox_are_zeros(worker_settings: WorkerSettings) -> None:
    answer = await command(worker_settings, "outbox", "stats")

    assert answer.data == operating_outbox.Stats(
        states=dict.fromkeys(operating_outbox.STATES, 0),
        oldest_seconds=dict.fromkeys(operating_outbox.STATES, 0.0),
        lanes={},
        types={},
    )
    assert answer.text.splitlines()[1].split() == ["pending", "0", "0.0"]


async def test_stats_count_every_state_by_lane_and_by_type(
    worker_settings: WorkerSettings, database: Connection, refused: CalculationRequest
) -> None:
    other = await store(database)
    await database.execute("UPDATE outbox SET created_at = now() - interval '90 s'")

    answer = await command(worker_settings, "outbox", "stats")

    assert isinstance(answer.data, operating_outbox.Stats)
    assert answer.data.states == {"pending": 1, "failing": 1, "waiting": 1, "parked": 0}
    assert 90 <= answer.data.oldest_seconds["pending"] < 120
    assert set(answer.data.lanes) == {lanes.lane_of(other.id), lanes.lane_of(refused.id)}
    assert answer.data.types == {
        "request.created": {"pending": 1, "failing": 1, "waiting": 0, "parked": 0},
        "request.email_sent": {"pending": 0, "failing": 0, "waiting": 1, "parked": 0},
    }


async def test_list_shows_held_events_with_their_errors(
    worker_settings: WorkerSettings, refused: CalculationRequest
) -> None:
    first, second = await listed(worker_settings)

    assert (first.event_id, first.state) == (event_id(refused), "failing")
    assert first.attempts >= 1  # on a slow machine the event is due again before the last pass
    assert first.last_error == "returned: no queue is bound for it"
    assert first.next_attempt_at is not None
    assert first.parked_at is None
    assert (second.event_id, second.state) == (event_id(refused, "request.email_sent", 2), "waiting")
    assert second.next_attempt_at is None


async def test_list_shows_when_an_event_was_parked(
    worker_settings: WorkerSettings, database: Connection, refused: CalculationRequest
) -> None:
    await park_all(database)

    parked, waiting = await listed(worker_settings)

    assert (parked.uuid, parked.state, parked.attempts) == (refused.uuid, "parked", 10)
    assert parked.parked_at == await database.fetchval("SELECT max(parked_at) FROM outbox_held")
    assert waiting.state == "waiting"


async def test_list_is_limited(worker_settings: WorkerSettings, refused: CalculationRequest) -> None:
    [only] = await listed(worker_settings, "--limit", "1")

    assert only.event_id == event_id(refused)


async def test_head_of_the_outbox_is_the_oldest_of_all_lanes(
    worker_settings: WorkerSettings, database: Connection
) -> None:
    requests = [await store(database) for _ in range(20)]

    found = await listed(worker_settings, "--pending", "--limit", "5")

    assert [event.event_id for event in found] == [event_id(request) for request in requests[:5]]
    assert {event.state for event in found} == {"pending"}


async def test_retry_makes_parked_events_due_and_they_are_delivered_in_order(
    worker_settings: WorkerSettings,
    database: Connection,
    deliver: Deliver,
    refused: CalculationRequest,
) -> None:
    await park_all(database)

    answer = await command(worker_settings, "outbox", "retry", event_id(refused))

    assert answer.data == {event_id(refused): "due now"}
    assert await deliver() == [event_id(refused), event_id(refused, "request.email_sent", 2)]


async def test_retry_of_all_parked_leaves_the_failing_ones_alone(
    worker_settings: WorkerSettings, database: Connection, refused: CalculationRequest
) -> None:
    await park_all(database)
    waiting = "UPDATE outbox_held SET next_attempt_at = now() + interval '1 h' WHERE sequence = 2"
    await database.execute(waiting)

    first = await command(worker_settings, "outbox", "retry", "--all-parked")
    second = await command(worker_settings, "outbox", "retry", "--all-parked")

    assert first.data == {event_id(refused): "due now"}
    assert (second.data, second.text, second.status) == ({}, "none", 0)
    rows = await database.fetch(
        "SELECT attempts, parked_at, next_attempt_at <= now() AS due FROM outbox_held ORDER BY id"
    )
    assert rows == [(10, None, True), (0, None, False)]


async def test_retried_event_keeps_its_attempts_and_is_not_parked_by_another_refusal(
    worker_settings: WorkerSettings,
    database: Connection,
    routes: Routes,
    deliver: Deliver,
    refused: CalculationRequest,
) -> None:
    await park_all(database)
    await routes.close()

    await command(worker_settings, "outbox", "retry", event_id(refused))
    await deliver()

    [failing, _] = await listed(worker_settings)
    assert (failing.state, failing.attempts) == ("failing", 11)


async def test_retry_wakes_the_relay(
    worker_settings: WorkerSettings, database: Connection, refused: CalculationRequest
) -> None:
    heard = asyncio.Event()
    await database.add_listener(lanes.CHANNEL, lambda *_: heard.set())

    await command(worker_settings, "outbox", "retry", event_id(refused))

    await eventually(heard.is_set)


async def test_retrying_or_parking_a_published_event_is_not_an_error(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    await database.execute("DELETE FROM outbox")

    retried = await command(worker_settings, "outbox", "retry", event_id(stored_request))
    parked = await command(worker_settings, "outbox", "park", event_id(stored_request))

    assert (retried.data, retried.status) == ({event_id(stored_request): "not held"}, 0)
    assert (parked.data, parked.status) == ({event_id(stored_request): "not in the outbox"}, 0)


async def test_parked_event_and_the_later_ones_wait_until_it_is_retried(
    worker_settings: WorkerSettings,
    database: Connection,
    deliver: Deliver,
    stored_request: CalculationRequest,
) -> None:
    other = await store(database)
    await announce_next(database, stored_request.id)

    parked = await command(worker_settings, "outbox", "park", event_id(stored_request))
    delivered_meanwhile = await deliver()
    await command(worker_settings, "outbox", "retry", event_id(stored_request))

    assert parked.data == {event_id(stored_request): "parked"}
    assert delivered_meanwhile == [event_id(other)]
    assert await deliver() == [
        event_id(stored_request),
        event_id(stored_request, "request.email_sent", 2),
    ]


async def test_parking_a_later_event_does_not_hold_the_earlier_one(
    worker_settings: WorkerSettings,
    database: Connection,
    deliver: Deliver,
    stored_request: CalculationRequest,
) -> None:
    await announce_next(database, stored_request.id)

    await command(worker_settings, "outbox", "park", event_id(stored_request, "request.email_sent", 2))

    assert await deliver() == [event_id(stored_request)]
    [parked] = await listed(worker_settings)
    assert (parked.state, parked.last_error) == ("parked", "parked by an operator")


async def test_retried_later_event_still_waits_for_the_earlier_one(
    worker_settings: WorkerSettings,
    database: Connection,
    deliver: Deliver,
    stored_request: CalculationRequest,
) -> None:
    await announce_next(database, stored_request.id)
    later = event_id(stored_request, "request.email_sent", 2)
    await command(worker_settings, "outbox", "park", later)

    answer = await command(worker_settings, "outbox", "retry", later)

    assert answer.data == {later: "due now"}
    assert await deliver() == [event_id(stored_request), later]


async def test_parking_again_changes_nothing(
    worker_settings: WorkerSettings, database: Connection, refused: CalculationRequest
) -> None:
    await command(worker_settings, "outbox", "park", event_id(refused))
    before = await database.fetch("SELECT * FROM outbox_held ORDER BY id")

    again = await command(worker_settings, "outbox", "park", event_id(refused))

    assert again.data == {event_id(refused): "parked before"}
    assert await database.fetch("SELECT * FROM outbox_held ORDER BY id") == before
    assert before[0]["last_error"] == "returned: no queue is bound for it"


async def test_lane_held_by_a_relay_is_waited_for(
    worker_settings: WorkerSettings,
    database: Connection,
    stored_request: CalculationRequest,
) -> None:
    park = ("outbox", "park", event_id(stored_request))
    async with database.transaction():
        assert (await lock_lanes(database, [lanes.lane_of(stored_request.id)])).lanes
        busy = await command(worker_settings, *park, lane_seconds=0.2)
        parking = asyncio.create_task(command(worker_settings, *park))
        await asyncio.sleep(0.1)
        assert not parking.done()

    assert busy.data == {event_id(stored_request): "busy: a relay holds its lane; try again"}
    assert busy.status == 1
    assert (await parking).data == {event_id(stored_request): "parked"}


async def test_lane_is_free_again_soon_after_an_operator_vanished(
    worker_settings: WorkerSettings,
    database: Connection,
    postgres_link: TcpProxy,
    stored_request: CalculationRequest,
) -> None:
    """For instance with its machine: TCP would notice after two hours."""
    away = settings_with(worker_settings, database_url=postgres_link.url)
    postgres_link.hold_before(b"UPDATE outbox_held")
    parking = asyncio.create_task(command(away, "outbox", "park", event_id(stored_request)))
    await postgres_link.marker_reached.wait()

    async def lane_is_free() -> bool:
        async with database.transaction():
            return bool((await lock_lanes(database, [lanes.lane_of(stored_request.id)])).lanes)

    was_free = await lane_is_free()
    await eventually(lane_is_free)

    assert not was_free
    await postgres_link.cut()
    with pytest.raises((*OUTAGE_ERRORS, PostgresUnavailable)):
        await parking
    assert await database.fetchval("SELECT request_id FROM outbox") == stored_request.id


async def test_commands_need_nothing_but_the_database(
    worker_settings: WorkerSettings, stored_request: CalculationRequest
) -> None:
    without_broker = settings_with(worker_settings, amqp_url="")

    [pending] = await listed(without_broker, "--pending")

    assert pending.uuid == stored_request.uuid


@pytest.mark.parametrize(
    "text",
    [
        "",
        "req_1.request.created.1",
        "{uuid}",
        "{uuid}.1",
        "{uuid}..1",
        "{uuid}.a.-1",
        "{uuid}.a.²",
        "{uuid}.a.99999999999",
    ],
)
def test_invalid_event_id_is_not_parsed(text: str) -> None:
    uuid = "req_0000000000000000000001"

    assert EventKey.parse(text.format(uuid=uuid)) is None


def test_event_id_is_parsed_to_the_same_id() -> None:
    written = "req_0000000000000000000001.request.email_sent.2"

    key = EventKey.parse(written)

    assert key is not None
    assert (key.type, key.sequence, key.event_id) == ("request.email_sent", 2, written)


async def test_outbox_has_room_below_the_limit(database: Connection) -> None:
    await store(database)

    assert await outbox_statements.has_room(database, 2)
    assert not await outbox_statements.has_room(database, 1)


async def test_discarded_event_is_gone_and_the_later_ones_are_delivered(
    worker_settings: WorkerSettings,
    database: Connection,
    deliver: Deliver,
    refused: CalculationRequest,
) -> None:
    await park_all(database)

    words = ("--by", "Ada", "--reason", "cannot be encoded")
    answer = await command(worker_settings, "outbox", "discard", event_id(refused), *words)
    again = await command(worker_settings, "outbox", "discard", event_id(refused), *words)

    assert answer.data == {event_id(refused): "discarded"}
    assert (again.data, again.status) == ({event_id(refused): "discarded before"}, 0)
    assert await deliver() == [
        event_id(refused, "request.email_sent", 2),
        event_id(refused, "request.email_failed", 3),
    ]
    [action] = await operator_actions.read(database, refused.id)
    assert (action.action, action.subject) == ("outbox discard", event_id(refused))
    assert (action.operator, action.reason) == ("Ada", "cannot be encoded")


async def test_request_whose_first_event_was_discarded_has_an_email_that_was_cancelled(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    key = event_id(stored_request)

    await command(worker_settings, "outbox", "discard", key, "--reason", "a test of the firm")
    await intend(database, stored_request)  # The message had arrived all the same.

    email = await database.fetchrow("SELECT state, reason, attempts, event_sequence FROM email")
    assert tuple(email or ()) == ("failed", "cancelled", 0, 2)
    async with database.transaction(isolation="repeatable_read", readonly=True):
        anomalies = await checks.find_anomalies(database, Limits(event_seconds=0.0))
    assert {anomaly.name for anomaly in anomalies if anomaly.count} <= {"event_overdue"}


async def test_discarding_a_replayed_event_leaves_the_email_alone(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    await intend(database, stored_request)

    await command(
        worker_settings, "outbox", "discard", event_id(stored_request), "--reason", "replayed twice"
    )

    assert await database.fetchval("SELECT state FROM email") == "pending"


async def test_orphaned_event_can_be_discarded(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    await database.execute("DELETE FROM calculation_request")

    answer = await command(
        worker_settings, "outbox", "discard", event_id(stored_request), "--reason", "an orphan"
    )

    assert answer.data == {event_id(stored_request): "discarded"}
    assert await database.fetchval("SELECT count(*) FROM outbox") == 0


async def test_discarding_needs_a_reason(worker_settings: WorkerSettings) -> None:
    with pytest.raises(InvalidArgument, match="--reason"):
        await command(worker_settings, "outbox", "discard", "req_0000000000000000000000.request.created.1")


async def test_busy_lane_does_not_keep_events_of_other_lanes_from_being_discarded(
    worker_settings: WorkerSettings, database: Connection, other_connection: Connection
) -> None:
    requests = [await store(database) for _ in range(20)]
    first, *_, last = sorted(requests, key=lambda request: lanes.lane_of(request.id))
    assert lanes.lane_of(first.id) < lanes.lane_of(last.id)
    heard = asyncio.Event()
    await other_connection.add_listener(lanes.CHANNEL, lambda *_: heard.set())
    words = ("outbox", "discard", event_id(first), event_id(last), "--reason", "a test")

    async with database.transaction():
        assert (await lock_lanes(database, [lanes.lane_of(first.id)])).lanes
        answer = await command(worker_settings, *words, lane_seconds=0.2)

    assert answer.data == {
        event_id(first): "busy: a relay holds its lane; try again",
        event_id(last): "discarded",
    }
    assert answer.status == 1
    await eventually(heard.is_set)


async def test_discard_beside_a_correction_does_not_deadlock(
    worker_settings: WorkerSettings,
    database: Connection,
    other_connection: Connection,
    stored_request: CalculationRequest,
) -> None:
    words = ("outbox", "discard", event_id(stored_request), "--reason", "a test")

    async with other_connection.transaction():
        await reading.lock_all(other_connection, [stored_request.id])
        discarding = asyncio.create_task(command(worker_settings, *words))
        await eventually(lambda: has_waiting_statement(database))
        replaced = await emails.replace(other_connection, stored_request.id, sends=True)

    assert replaced == event_id(stored_request)
    assert (await discarding).data == {event_id(stored_request): "discarded"}
    assert await database.fetchval("SELECT state FROM email") == "pending"


async def test_only_changes_are_on_record(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    outcomes: list[str] = []
    for verb in ("park", "park", "retry", "retry"):
        answer = await command(worker_settings, "outbox", verb, event_id(stored_request), "--by", "Ada")
        assert isinstance(answer.data, dict)
        outcomes += answer.data.values()

    assert outcomes == ["parked", "parked before", "due now", "due in its turn"]
    actions = await operator_actions.read(database, stored_request.id)
    assert [(action.action, action.operator) for action in actions] == [
        ("outbox park", "Ada"),
        ("outbox retry", "Ada"),
    ]


async def test_two_operators_discard_an_event_once(
    worker_settings: WorkerSettings,
    database: Connection,
    other_connection: Connection,
    stored_request: CalculationRequest,
) -> None:
    words = ("outbox", "discard", event_id(stored_request), "--reason", "a test of the firm")
    async with database.transaction():
        assert (await lock_lanes(database, [lanes.lane_of(stored_request.id)])).lanes
        both = [asyncio.create_task(command(worker_settings, *words)) for _ in range(2)]
        await eventually(lambda: both_wait_for_a_lane(other_connection))

    outcomes = [answer.data for answer in await asyncio.gather(*both)]

    assert sorted(map(str, outcomes)) == [
        str({event_id(stored_request): "discarded before"}),
        str({event_id(stored_request): "discarded"}),
    ]
    assert len(await operator_actions.read(database, stored_request.id)) == 1
    assert await database.fetchval("SELECT count(*) FROM email") == 1


async def both_wait_for_a_lane(database: Connection) -> bool:
    """Whether two operators wait for a lane."""
    connected: bool = await database.fetchval(
        """
        SELECT count(*) = 2
          FROM pg_stat_activity
         WHERE datname = current_database()
           AND application_name LIKE '% operator'
           AND query LIKE 'COMMIT%' -- between two attempts to lock it
        """
    )
    return connected


@pytest.mark.parametrize(
    "statement", [b"INSERT INTO operator_action", b"INSERT INTO email", b"UPDATE email", b"COMMIT"]
)
async def test_discarding_that_is_cut_off_changes_nothing_and_can_be_repeated(
    *,
    statement: bytes,
    worker_settings: WorkerSettings,
    database: Connection,
    postgres_link: TcpProxy,
    stored_request: CalculationRequest,
) -> None:
    words = ("outbox", "discard", event_id(stored_request), "--reason", "a test of the firm")
    postgres_link.hold_before(statement)
    cut_off = asyncio.create_task(
        command(settings_with(worker_settings, database_url=postgres_link.url), *words)
    )
    await eventually(postgres_link.marker_reached.is_set)
    await postgres_link.cut()
    with pytest.raises(OUTAGE_ERRORS):
        await cut_off
    left = await database.fetchval("SELECT count(*) FROM outbox")
    recorded = await operator_actions.read(database, stored_request.id)

    again = await command(worker_settings, *words)

    assert (left, recorded) == (1, [])
    assert again.data == {event_id(stored_request): "discarded"}
    assert await database.fetchval("SELECT state FROM email") == "failed"
    assert len(await operator_actions.read(database, stored_request.id)) == 1
