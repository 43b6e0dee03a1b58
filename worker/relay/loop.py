"""Publishes the outbox to RabbitMQ. `run` is the loop. `relay_due` is one pass over some lanes."""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
import structlog
from aio_pika.abc import AbstractChannel

from service.identifiers import uuid_of
from service.outbox import lanes
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.probes import NotReady
from service.telemetry import logs
from worker import metrics
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BLOCKED, CLOSE_SECONDS, BrokerUnavailable, open_channel, open_role
from worker.relay import outbox_tables
from worker.relay.outbox_tables import OutboxRow
from worker.relay.publisher import Publisher, PublishResult
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

# The most lanes per pass, so that a second relay finds free lanes. With one lane per pass, an event could
# wait for sixteen passes.
_LANES_AT_ONCE = lanes.LANES // 2
# The longest deadline of find_lanes. While a backup holds an old snapshot, vacuum cannot remove published
# events, and find_lanes steps over all of them. After an hour at 100 events per second, it took 0.5 s instead
# of 0.2 ms, and a relay could still publish 1,000 events per second. With 128 MB of shared_buffers instead of
# 1 GB, it took 3 to 10 s, and a relay could publish 100 to 400 events per second.
_LONGEST_FIND_SECONDS = 30.0
# A transaction is idle while its events are published, for at most twice BROKER_TIMEOUT_SECONDS. If it is
# idle for this much longer, the relay has stopped working. Then Postgres ends the session, and another relay
# publishes the same events again.
_SPARE_SECONDS = 2 * CLOSE_SECONDS  # one to close the connection of the bypass, one to spare
_BATCH_SIZE = 1_000  # events that are read and published together
_HELD_BATCH_SIZE = 20  # held events, in addition. Each retry adds a copy to every queue that takes the event.
_RETRY_SECONDS = 1.0  # an event's pause after its first failure. It doubles with each failure.

_EXCHANGES = (topology.REQUESTS, topology.NOTIFICATIONS_ALONE)
_NOT_CONFIRMED = "not confirmed: a bound queue has no majority of its members, or is very slow"
_NOT_CONNECTED = "not connected to RabbitMQ"

_log = structlog.get_logger()


class Relay:
    """Publishes the events of the outbox, in order within each request, and deletes the confirmed events.

    After a crash between confirm and commit, the same events are published again. So delivery is at least
    once.

    Any number of relays share the lanes. A relay locks some lanes at a time, until its transaction ends. So
    there is no leader, and nothing to clean up after a crash.
    """

    def __init__(self, settings: WorkerSettings, pool: Pool, woken: asyncio.Event) -> None:
        self._settings = settings
        self._pool = pool
        self._woken = woken
        self._obstacle = _NOT_CONNECTED
        self._find_seconds = settings.work_timeout_seconds  # the deadline of find_lanes, adapted to its time
        metrics.broker_blocked.set_function(lambda: self._obstacle == BLOCKED)

    async def check(self) -> None:
        """Raise NotReady while RabbitMQ is unavailable or blocks publishers."""
        if self._obstacle:
            raise NotReady(self._obstacle)

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until *stop*. Reconnect after every outage of RabbitMQ, and to replace a channel."""
        pauses = Pauses("relay_paused")
        while not stop.is_set():
            try:
                async with open_role(self._settings, name="relay", needs=_EXCHANGES) as channel:
                    await self._relay_on(channel, pauses, stop)
            except BrokerUnavailable as error:
                self._obstacle = str(error) or _NOT_CONNECTED
                await wait_at_most(pauses.log(error, obstacle=self._obstacle), stop)

    async def _relay_on(self, channel: AbstractChannel, pauses: Pauses, stop: asyncio.Event) -> None:
        """Relay on one channel until *stop*. Wait after a pass that published nothing.

        Returns early if the channel must be replaced although RabbitMQ answers: a queue blocked it, RabbitMQ
        refused events on it, or Postgres failed during a publish. Raises BrokerUnavailable in an outage of
        RabbitMQ.
        """
        publisher = await Publisher.on(channel, timeout_seconds=self._settings.broker_timeout_seconds)
        await publisher.probe()
        self._obstacle = ""
        while publisher.is_usable and not stop.is_set():
            self._woken.clear()
            try:
                moved = await self.relay_due(publisher)
            except PostgresUnavailable as error:
                # Either Postgres is unavailable, or find_lanes has very many deleted events to step over.
                self._find_seconds = min(self._find_seconds + 1.0, _LONGEST_FIND_SECONDS)
                await pauses.log_and_wait(error, stop)
                continue
            pauses.reset()
            if not moved:
                await wait_at_most(self._settings.relay_poll_seconds, self._woken, stop)
        if channel.is_closed:
            raise BrokerUnavailable("the channel was closed")

    async def relay_due(self, publisher: Publisher) -> int:
        """Make one pass: publish the oldest events of some lanes, and held events that are due. Settle them.

        Returns how many events were confirmed or held. Raises BrokerUnavailable in an outage of RabbitMQ, but
        first deletes the confirmed events.
        """
        with_work = await self._find_lanes()
        # Random lanes, so that relays that start together do not compete for the same ones.
        some_lanes = random.sample(with_work, min(len(with_work), _LANES_AT_ONCE))
        if not some_lanes:
            return 0
        async with connections.transaction(
            self._pool,
            # For publishing twice, as `_publish` may; for reading and settling as long as finding may take.
            seconds=2 * self._settings.broker_timeout_seconds + 2 * self._find_seconds,
            # If Postgres crashes and loses this commit, the same events are published again, in order.
            waits_for_disk=False,
        ) as connection:
            locked = await lanes.try_lock(connection, some_lanes)
            per_lane = math.ceil(_BATCH_SIZE / len(some_lanes))
            rows = await outbox_tables.read(connection, locked, pending=per_lane, held=_HELD_BATCH_SIZE)
            if not rows:
                return 0
            window = _first_of_each_request(rows)
            result = await self._publish_while_locked(connection, publisher, window)
            to_hold = [row for row in rows if not row.is_held and (row.must_wait or row.id in result.failed)]
            delivered = [row for row in window if row.id in result.confirmed]
            failed = [row for row in window if row.id in result.failed]
            # The later events of a failed event's request are held in the next pass, as they must wait then.
            # `hold` comes before `delete`: deleting a held event makes the next held event of its request
            # due, which may be one that is held only now.
            await outbox_tables.hold(connection, to_hold)
            await outbox_tables.delete(connection, delivered)
            await outbox_tables.postpone(connection, failed, result.failed, base_seconds=_RETRY_SECONDS)
        _report(delivered, failed, result)
        if isinstance(result.outage, BrokerUnavailable):
            raise result.outage
        if result.outage is not None:
            raise BrokerUnavailable from result.outage
        return len(delivered) + len(to_hold)

    async def _find_lanes(self) -> list[int]:
        """Return the lanes with work. The deadline of the next pass follows from the time that this took."""
        began = time.monotonic()
        async with connections.acquired(self._pool, seconds=self._find_seconds) as connection:
            with_work = await outbox_tables.find_lanes(connection)
        took = time.monotonic() - began
        self._find_seconds = max(self._settings.work_timeout_seconds, min(2 * took, _LONGEST_FIND_SECONDS))
        return with_work

    async def _publish_while_locked(
        self, connection: Connection, publisher: Publisher, window: Sequence[OutboxRow]
    ) -> PublishResult:
        """Publish a window while the transaction on *connection* keeps the lanes locked.

        If a publish takes long, Postgres is told to wait. If it has failed, another relay may have locked the
        lanes. So the publish is cancelled: its events would be repeats, or of requests erased meanwhile.
        """
        longest = 2 * self._settings.broker_timeout_seconds
        publishing = asyncio.create_task(self._publish(publisher, window))
        try:
            await asyncio.wait([publishing], timeout=connections.SILENCE_SECONDS / 2)
            if not publishing.done():  # Rare: nearly every window is confirmed in milliseconds.
                await connection.execute(connections.allow_silence(longest + _SPARE_SECONDS))
            return await publishing
        finally:
            publishing.cancel()

    async def _publish(self, publisher: Publisher, window: Sequence[OutboxRow]) -> PublishResult:
        """Publish a window. If RabbitMQ works, but does not confirm an event in time, the event has failed.

        Over a second connection, as this one may be blocked, a probe shows whether RabbitMQ works.
        While a bound quorum queue has no majority, RabbitMQ confirms no message for it, and blocks the
        channel for a minute per message. The queue may be another team's. E-mails must not wait for it. So
        the unconfirmed `request.created` are published to our own queue as well, over another connection.
        """
        result = await publisher.publish(window)
        if not isinstance(result.outage, TimeoutError):
            return result
        late = [row for row in window if row.id not in result.confirmed and row.id not in result.failed]
        created = [row for row in late if row.type == topology.NOTIFICATIONS.routing_key]
        seconds = self._settings.broker_timeout_seconds
        try:
            async with (
                asyncio.timeout(seconds),
                open_channel(self._settings, name="relay-notifications") as channel,
            ):
                bypass = await Publisher.on(
                    channel, timeout_seconds=seconds, exchange=topology.NOTIFICATIONS_ALONE
                )
                await bypass.probe()
                outage = (await bypass.publish(created)).outage
        except (BrokerUnavailable, TimeoutError):
            return result
        if outage is not None:
            return result
        failed = {**result.failed, **dict.fromkeys((row.id for row in late), _NOT_CONFIRMED)}
        return msgspec.structs.replace(result, failed=failed, outage=None)


def _first_of_each_request(rows: Sequence[OutboxRow]) -> list[OutboxRow]:
    """Return the first event of each request, without events that wait for a held one.

    If a window had two events of a request, and the first failed, the second would overtake it.
    """
    first: dict[UUID, OutboxRow] = {}
    for row in rows:
        if not row.must_wait:
            first.setdefault(row.request_id, row)
    return list(first.values())


def _report(delivered: Sequence[OutboxRow], failed: Sequence[OutboxRow], result: PublishResult) -> None:
    now = time.monotonic()
    for row in delivered:
        metrics.events_published.labels(row.type).inc()
        metrics.delivery_seconds.observe(max(0.0, now - row.written))
        if row.is_held:
            _log.info("held_event_published", attempts=row.attempts + 1, **_story(row))
    for row in failed:
        _log.warning("event_not_published", reason=result.failed[row.id], **_story(row))
    if delivered:
        _log.info("outbox_relayed", events=len(delivered), failed=len(failed))


def _story(row: OutboxRow) -> dict[str, Any]:
    return {"event_id": row.event_id} | logs.about(uuid_of(row.request_id), row.traceparent)
