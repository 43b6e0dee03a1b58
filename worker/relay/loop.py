"""Publishes the outbox to RabbitMQ. `run` is the loop. `relay_due` is one pass."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from aio_pika.abc import AbstractChannel

from service.identifiers import uuid_of
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.probes import NotReady
from service.telemetry import logs
from worker import metrics
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BLOCKED, CLOSE_SECONDS, BrokerUnavailable, open_channel, open_role
from worker.relay import pointers
from worker.relay.pointers import OutboxEvent
from worker.relay.publisher import Publisher, PublishResult
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

# A transaction is idle while its events are published, for at most twice BROKER_TIMEOUT_SECONDS. If it is
# idle for this much longer, the relay has stopped working. Then Postgres ends the session, and another relay
# publishes the same events again.
_SPARE_SECONDS = 2 * CLOSE_SECONDS  # one to close the second connection of `_publish`, one to spare
_BATCH_SIZE = 1_000  # pending events in a window: a pass locks, reads and publishes its events together
_HELD_BATCH_SIZE = 20  # held events in a window, in addition
# The pause after each retry that fails, because each adds a copy to every other queue that takes the event.
# So there are at most 100 such copies a second and relay.
_FAILED_RETRY_SECONDS = 0.01
_RETRY_SECONDS = 1.0  # an event's pause after its first failure. It doubles with each failure.

_EXCHANGES = (topology.REQUESTS, topology.NOTIFICATIONS_ALONE)
_NOT_CONFIRMED = "not confirmed: a bound queue has no majority of its members, or is very slow"
_NOT_CONNECTED = "not connected to RabbitMQ"

_log = structlog.get_logger()


class Relay:
    """Publishes the events of the outbox, in order within each request, and deletes the confirmed events.

    After a crash between confirm and commit, the same events are published again: delivery is at least once.
    Any number of relays share the outbox. A relay locks the events that it publishes, until its transaction
    ends. So there is no leader, and nothing to clean up after a crash.
    """

    def __init__(self, settings: WorkerSettings, pool: Pool, woken: asyncio.Event) -> None:
        self._settings = settings
        self._pool = pool
        self._woken = woken
        self._obstacle = _NOT_CONNECTED
        self._retries_from = 0.0  # by time.monotonic
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
        seconds = self._settings.broker_timeout_seconds
        publisher = Publisher(await channel.get_underlay_channel(), timeout_seconds=seconds)
        await publisher.probe()
        self._obstacle = ""
        while publisher.is_usable and not stop.is_set():
            self._woken.clear()
            try:
                moved = await self.relay_due(publisher)
            except PostgresUnavailable as error:
                await pauses.log_and_wait(error, stop)
                continue
            pauses.reset()
            if not moved:
                left = self._retries_from - time.monotonic()
                await wait_at_most(left if left > 0 else self._settings.relay_poll_seconds, self._woken, stop)
        if channel.is_closed:
            raise BrokerUnavailable("the channel was closed")

    async def relay_due(self, publisher: Publisher) -> int:
        """Make one pass: publish the oldest pending events, and held events that are due. Settle them.

        Returns how many events were confirmed, or were pending and have failed. Raises BrokerUnavailable in
        an outage of RabbitMQ, but first deletes the confirmed events.
        """
        async with connections.transaction(
            self._pool,
            # For publishing twice, as `_publish` may; for reading and settling. While a backup holds an old
            # snapshot, reading steps over the pointers of all events published since: 300,000 took 20 ms.
            seconds=2 * (self._settings.broker_timeout_seconds + self._settings.work_timeout_seconds),
            settings=pointers.SETTINGS,
        ) as connection:
            most_held = _HELD_BATCH_SIZE if time.monotonic() >= self._retries_from else 0
            window = await pointers.lock(connection, pending=_BATCH_SIZE, held=most_held)
            if not window:
                return 0
            result = await self._publish_while_locked(connection, publisher, window)
            delivered = [event for event in window if event.event_id in result.confirmed]
            failed = [event for event in window if event.event_id in result.failed]
            if delivered:
                await pointers.delete(connection, delivered)
            if failed:
                await pointers.hold(connection, failed, result.failed, base_seconds=_RETRY_SECONDS)
        retried_in_vain = sum(event.is_held for event in failed)
        if retried_in_vain:
            self._retries_from = time.monotonic() + retried_in_vain * _FAILED_RETRY_SECONDS
        _report(delivered, failed, result)
        if isinstance(result.outage, BrokerUnavailable):
            raise result.outage
        if result.outage is not None:
            raise BrokerUnavailable from result.outage
        return len(delivered) + len(failed) - retried_in_vain

    async def _publish_while_locked(
        self, connection: Connection, publisher: Publisher, window: Sequence[OutboxEvent]
    ) -> PublishResult:
        """Publish a window while the transaction on *connection* keeps the events locked.

        If a publish takes long, Postgres is told to wait. If it has failed, another relay may have locked the
        events. So the publish is cancelled: its events would be repeats, or of requests erased meanwhile.
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

    async def _publish(self, publisher: Publisher, window: Sequence[OutboxEvent]) -> PublishResult:
        """Publish a window. If RabbitMQ works, but does not confirm an event in time, the event has failed.

        While a bound quorum queue has no majority, RabbitMQ confirms no message for it, and blocks the
        channel. So a probe over a second connection shows whether RabbitMQ works. E-mails must not wait for
        another team's queue, so this connection also takes unconfirmed `request.created` to our own queue.
        """
        result = await publisher.publish(window)
        if not isinstance(result.outage, TimeoutError):
            return result
        settled = result.confirmed | result.failed.keys()
        late = [event for event in window if event.event_id not in settled]
        created = [event for event in late if event.type == topology.NOTIFICATIONS.routing_key]
        seconds = self._settings.broker_timeout_seconds
        try:
            async with (
                asyncio.timeout(seconds),
                open_channel(self._settings, name="relay-notifications") as channel,
            ):
                underlay = await channel.get_underlay_channel()
                bypass = Publisher(underlay, timeout_seconds=seconds, exchange=topology.NOTIFICATIONS_ALONE)
                await bypass.probe()
                outage = (await bypass.publish(created)).outage
        except (BrokerUnavailable, TimeoutError):
            return result
        if outage is not None:
            return result
        failed = {**result.failed, **dict.fromkeys((event.event_id for event in late), _NOT_CONFIRMED)}
        return msgspec.structs.replace(result, failed=failed, outage=None)


def _report(delivered: Sequence[OutboxEvent], failed: Sequence[OutboxEvent], result: PublishResult) -> None:
    now = time.monotonic()
    for event in delivered:
        metrics.events_published.labels(event.type).inc()
        metrics.delivery_seconds.observe(max(0.0, now - event.written))
        if event.is_held:
            _log.info("held_event_published", attempts=event.attempts + 1, **_story(event))
    for event in failed:
        _log.warning("event_not_published", reason=result.failed[event.event_id], **_story(event))
    if delivered:
        _log.info("outbox_relayed", events=len(delivered), failed=len(failed))


def _story(event: OutboxEvent) -> dict[str, Any]:
    return {"event_id": event.event_id} | logs.about(uuid_of(event.request_id), event.traceparent)
