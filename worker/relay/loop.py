"""Publishes the outbox to RabbitMQ. `run` is the loop. `relay_due` is one pass over all lanes with work."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
import structlog
from aio_pika.abc import AbstractChannel

from service.identifiers import uuid_of
from service.outbox import lanes
from service.outbox.events import EVENT_TYPES
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.server.probes import NotReady
from service.telemetry import logs
from worker import metrics
from worker.rabbitmq import topology
from worker.rabbitmq.alarm import Alarm
from worker.rabbitmq.connection import CLOSE_SECONDS, BrokerUnavailable, open_channel, open_role
from worker.relay import outbox_tables
from worker.relay.outbox_tables import OutboxRow
from worker.relay.publisher import Publisher, PublishResult
from worker.relay.work import LaneMarks, find_work
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

# Lanes per transaction: half of them, so that another relay can work on the other half. With one lane per
# transaction, an event could wait behind sixteen transactions.
_LANES_AT_ONCE = lanes.LANES // 2
# Once a pass has published events, the next passes follow after these pauses, without waiting for a NOTIFY. A
# busy process sends a NOTIFY only every 20 ms. A pass without events costs 0.2 ms.
_QUICK_LOOK_SECONDS = (0.001, 0.002, 0.004, 0.008)
# The deadline of find_work without low-water marks (see LaneMarks). The query may then read millions of dead
# rows, which vacuum cannot remove during a backup.
_FIRST_LOOK_SECONDS = 30.0
# A transaction is idle while its events are published, for at most twice BROKER_TIMEOUT_SECONDS. If it is
# idle for this much longer, Postgres ends the session, and another relay publishes the same events again.
_SPARE_SECONDS = 2 * CLOSE_SECONDS
_BATCH_SIZE = 1_000  # events that are read and published together
_HELD_BATCH_SIZE = 20  # held events, in addition. Each retry adds a copy to every queue that takes the event.
_RETRY_SECONDS = 1.0  # an event's pause after its first refusal. It doubles with each refusal.

_EXCHANGES = (topology.REQUESTS, topology.NOTIFICATIONS_ALONE)
_NOT_CONFIRMED = "not confirmed: a bound queue has no majority of its members, or is very slow"
_NOT_CONNECTED = "not connected to RabbitMQ"

_log = structlog.get_logger()


class Relay:
    """Publishes the events of the outbox, in order within each request, and deletes the confirmed events.

    Any number of relays share the lanes. A relay locks some lanes at a time, until its transaction ends. So
    there is no leader, and nothing to clean up after a crash.
    """

    def __init__(self, settings: WorkerSettings, pool: Pool, woken: asyncio.Event) -> None:
        self.marks = LaneMarks()
        self._settings = settings
        self._pool = pool
        self._woken = woken
        self._obstacle = _NOT_CONNECTED
        self._alarm = Alarm()
        self._statement_seconds = settings.work_timeout_seconds
        metrics.broker_blocked.set_function(lambda: self._alarm.is_raised)

    async def check(self) -> None:
        """Raise NotReady while RabbitMQ is unavailable or blocks publishers."""
        if self._alarm.is_raised:
            raise NotReady("RabbitMQ blocks publishers")
        if self._obstacle:
            raise NotReady(self._obstacle)

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until *stop*. Reconnect after every outage of RabbitMQ."""
        pauses = Pauses("relay_paused")
        while not stop.is_set():
            try:
                async with open_role(self._settings, name="relay", needs=_EXCHANGES) as channel:
                    await self._relay_on(channel, pauses, stop)
            except BrokerUnavailable as error:
                self._obstacle = str(error) or _NOT_CONNECTED
                await pauses.log_and_wait(error, stop)
            finally:
                self._alarm = Alarm()

    async def _relay_on(self, channel: AbstractChannel, pauses: Pauses, stop: asyncio.Event) -> None:
        """Relay on one channel until *stop*. Wait after a pass that published nothing.

        Returns early if the channel must be replaced although RabbitMQ answers: a queue blocks it, or
        Postgres failed during a publish. Raises BrokerUnavailable in an outage of RabbitMQ.
        """
        quick_looks: Iterator[float] = iter(())
        publisher = await Publisher.on(channel, timeout_seconds=self._settings.broker_timeout_seconds)
        async with in_background("broker_alarm", partial(self._alarm.watch, channel)):
            await publisher.probe(self._alarm, stop)
            self._obstacle = ""
            while not stop.is_set():
                if channel.is_closed:
                    raise BrokerUnavailable("the channel was closed")
                if not publisher.is_usable:
                    return
                self._woken.clear()
                try:
                    moved = await self.relay_due(publisher)
                except PostgresUnavailable as error:
                    self.marks.forget()
                    await pauses.log_and_wait(error, stop)
                    continue
                pauses.reset()
                if moved:
                    quick_looks = iter(_QUICK_LOOK_SECONDS)
                elif seconds := next(quick_looks, None):
                    await wait_at_most(seconds, self._woken, stop)
                else:
                    await wait_at_most(self._settings.relay_poll_seconds, self._woken, stop)

    async def relay_due(self, publisher: Publisher) -> int:
        """Make one pass over every lane with work. Returns how many events were confirmed or held.

        Raises BrokerUnavailable in an outage of RabbitMQ, but first deletes the confirmed events.
        """
        seconds = self._statement_seconds if any(self.marks.low_water) else _FIRST_LOOK_SECONDS
        async with connections.acquired(self._pool, seconds=seconds) as connection:
            work = await find_work(connection, self.marks.low_water)
        self.marks.note(work)
        with_work = work.lanes
        random.shuffle(with_work)  # so that relays that start together do not compete for the same lanes
        moved = 0
        for first in range(0, len(with_work), _LANES_AT_ONCE):
            some_lanes = with_work[first : first + _LANES_AT_ONCE]
            moved += await self._relay_lanes(publisher, some_lanes, work.due_lanes)
        return moved

    async def _relay_lanes(
        self, publisher: Publisher, some_lanes: Sequence[int], due_lanes: Sequence[int]
    ) -> int:
        """Publish the oldest events of some lanes, and held events that are due. Delete the confirmed events.

        After a crash between confirm and commit, the same events are published again. So delivery is at least
        once, in order within a request.
        """
        longest = self._settings.broker_timeout_seconds
        async with connections.transaction(
            self._pool,
            seconds=2 * longest + 2 * self._statement_seconds,
            # If Postgres crashes and loses this commit, the same events are published again, in order.
            waits_for_disk=False,
        ) as connection:
            pending, due = await self._take(connection, some_lanes, due_lanes)
            if not pending and not due:
                return 0
            window = [*_first_of_each_request(pending), *due]
            publishing = asyncio.create_task(self._publish(publisher, window))
            try:
                await asyncio.wait([publishing], timeout=connections.SILENCE_SECONDS / 2)
                if not publishing.done():
                    await connection.execute(connections.allow_silence(2 * longest + _SPARE_SECONDS))
                result = await publishing
            finally:
                publishing.cancel()
            delivered = [row for row in pending if row.id in result.confirmed]
            await outbox_tables.delete(connection, "outbox", delivered)
            moved = len(delivered)
            if due or result.failed or any(row.must_wait for row in pending):
                moved += await self._settle_held(connection, pending, due, result)
        _count([row for row in window if row.id in result.confirmed])
        if moved:
            _log.info("outbox_relayed", events=len(result.confirmed), failed=len(result.failed))
        if result.outage is not None:
            raise BrokerUnavailable from result.outage
        return moved

    async def _publish(self, publisher: Publisher, window: Sequence[OutboxRow]) -> PublishResult:
        """Publish a window. If RabbitMQ answers, but does not confirm an event in time, the event has failed.

        RabbitMQ confirms nothing while a bound quorum queue has no majority. It also blocks the channel, for
        a minute for each message. The queue may be another team's. So that e-mails do not wait for it, the
        unconfirmed `request.created` are published to our own queue, over another connection.
        """
        result = await publisher.publish(window)
        if self._alarm.is_raised or not isinstance(result.outage, TimeoutError):
            return result
        late = [row for row in window if row.id not in result.confirmed and row.id not in result.failed]
        seconds = self._settings.broker_timeout_seconds
        try:
            async with (
                asyncio.timeout(seconds),
                open_channel(self._settings, name="relay-notifications") as channel,
            ):
                bypass = await Publisher.on(
                    channel, timeout_seconds=seconds, exchange=topology.NOTIFICATIONS_ALONE
                )
                await bypass.probe(self._alarm, asyncio.Event())
                bypassed = await bypass.publish(
                    [row for row in late if row.type == topology.NOTIFICATIONS.routing_key]
                )
        except (BrokerUnavailable, TimeoutError):
            return result
        if bypassed.outage is not None:
            return result
        failed = {**result.failed, **dict.fromkeys((row.id for row in late), _NOT_CONFIRMED)}
        return msgspec.structs.replace(result, failed=failed, outage=None)

    async def _take(
        self, connection: Connection, some_lanes: Sequence[int], due_lanes: Sequence[int]
    ) -> tuple[list[OutboxRow], list[OutboxRow]]:
        """Lock the free lanes among *some_lanes*. Return their pending events, and held events to publish."""
        locked = await lanes.try_lock(connection, some_lanes)
        if not locked:
            return [], []
        low_water = self.marks.low_water
        pending = await outbox_tables.read(
            connection,
            locked,
            low_water=[low_water[lane] for lane in locked],
            limit=math.ceil(_BATCH_SIZE / len(locked)),
        )
        due_lanes = sorted({*locked} & {*due_lanes})
        if not due_lanes:
            return pending, []
        limit = math.ceil(_HELD_BATCH_SIZE / len(due_lanes))
        return pending, await outbox_tables.read_due(connection, due_lanes, limit=limit)

    async def _settle_held(
        self,
        connection: Connection,
        pending: Sequence[OutboxRow],
        due: Sequence[OutboxRow],
        result: PublishResult,
    ) -> int:
        """Hold pending events that failed or must wait. Count an attempt for every event that failed.

        Held events that were confirmed are deleted. Returns how many events were held or deleted. If an event
        has failed just now, the later events of its request are held in the next pass.
        """
        redelivered = [row for row in due if row.id in result.confirmed]
        to_hold = [row for row in pending if row.must_wait or row.id in result.failed]
        failed = [row for row in (*pending, *due) if row.id in result.failed]
        await outbox_tables.hold(connection, to_hold)  # Before `delete`, which makes waiting events due.
        await outbox_tables.delete(connection, "outbox_held", redelivered)
        await outbox_tables.postpone(connection, failed, result.failed, base_seconds=_RETRY_SECONDS)
        for row in redelivered:
            _log.info("held_event_published", attempts=row.attempts + 1, **_story(row))
        for row in failed:
            _log.warning("event_not_published", reason=result.failed[row.id], **_story(row))
        return len(redelivered) + len(to_hold)


def _story(row: OutboxRow) -> dict[str, Any]:
    return {"event_id": row.event_id} | logs.about(uuid_of(row.request_id), row.traceparent)


def _first_of_each_request(rows: Sequence[OutboxRow]) -> list[OutboxRow]:
    """Return the first event of each request, unless the request has a held event."""
    first: dict[UUID, OutboxRow] = {}
    for row in rows:
        if not row.must_wait:
            first.setdefault(row.request_id, row)
    return list(first.values())


def _count(settled: Sequence[OutboxRow]) -> None:
    """Count events that were confirmed and deleted. Unknown types are counted as "other"."""
    now = datetime.now(UTC)
    for event_type, number in Counter(row.type for row in settled).items():
        metrics.events_published.labels(event_type if event_type in EVENT_TYPES else "other").inc(number)
    for row in settled:
        metrics.delivery_seconds.observe(max(0.0, (now - row.created_at).total_seconds()))
