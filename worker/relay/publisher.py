"""Publishes events in windows. The events of a window are sent together, then all confirms are awaited."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import aiormq
import msgspec
from aio_pika.abc import AbstractChannel
from aiormq.abc import ChannelFrame
from aiormq.exceptions import DeliveryError, PublishError

from service.telemetry import tracing
from worker.rabbitmq import topology
from worker.rabbitmq.alarm import Alarm
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable
from worker.relay import amqp_frames
from worker.relay.outbox_tables import OutboxRow
from worker.waiting import wait_at_most

_UNBOUND_KEY = "relay.probe"
_CLOSING_SECONDS = 0.1  # for confirms that arrived just before the channel closed

# The future of each event's confirm, by row id. It fails if RabbitMQ nacks or returns the event.
Confirms: TypeAlias = dict[int, asyncio.Future[Any]]


class PublishResult(msgspec.Struct, frozen=True):
    """The outcome of a window, by row id. An event neither confirmed nor failed counts as not sent."""

    confirmed: frozenset[int] = frozenset()
    failed: Mapping[int, str] = {}  # the reason by row id: returned, refused or unencodable
    unencodable: frozenset[int] = frozenset()  # the failed events that were not sent
    outage: Exception | None = None  # If it is set, the channel must not be used again.


class Publisher:
    """Publishes windows of events to the exchange, one window at a time."""

    def __init__(
        self, channel: aiormq.Channel, *, timeout_seconds: float, exchange: str = topology.REQUESTS
    ) -> None:
        self._is_intact = True  # not after an outage or a cancelled publish
        self._channel = channel
        self._exchange = exchange
        self._timeout_seconds = timeout_seconds

    @classmethod
    async def on(
        cls, channel: AbstractChannel, *, timeout_seconds: float, exchange: str = topology.REQUESTS
    ) -> "Publisher":
        """Return a publisher on *channel*, which was opened with on_return_raises."""
        # aio-pika's own publish costs 1.5 times as much, because it waits for the socket each time.
        underlay = cast("aiormq.Channel", await channel.get_underlay_channel())
        return cls(underlay, timeout_seconds=timeout_seconds, exchange=exchange)

    @property
    def is_usable(self) -> bool:
        """Whether the channel can publish another window."""
        return self._is_intact and not self._channel.is_closed

    async def probe(self, alarm: Alarm, stop: asyncio.Event) -> None:
        """Publish two empty messages that no queue gets. RabbitMQ reports an alarm only after a publish.

        During an alarm RabbitMQ confirms the first message, and then reads no more from the connection. So
        this waits until the alarm ends or *stop* is set. Raises BrokerUnavailable if a message is not
        confirmed in time. On the exchange of the events, a queue bound to `#` would get the two messages.
        """
        for _ in range(2):
            await self._probe_once(alarm, stop)

    async def _probe_once(self, alarm: Alarm, stop: asyncio.Event) -> None:
        answered = asyncio.Event()
        probing = asyncio.create_task(
            self._channel.basic_publish(b"", exchange=topology.NOTIFICATIONS_ALONE, routing_key=_UNBOUND_KEY)
        )
        probing.add_done_callback(lambda _: answered.set())
        try:
            await wait_at_most(self._timeout_seconds, answered, stop)
            while alarm.is_raised and not (answered.is_set() or stop.is_set()):
                await wait_at_most(self._timeout_seconds, answered, stop)
            if not answered.is_set():
                raise BrokerUnavailable("not confirmed in time")
            await probing
        except BROKER_ERRORS as error:
            raise BrokerUnavailable from error
        finally:
            probing.cancel()

    async def publish(self, window: Sequence[OutboxRow]) -> PublishResult:
        """Publish all events of *window* together, and wait for their confirms, within one timeout.

        After an outage, or if this is cancelled, messages may be numbered but unsent. Then the channel is not
        used again.

        No two events may belong to one request. If the first were refused, the second would overtake it.
        """
        if not window:
            return PublishResult()
        if tracing.is_on():
            window = [_traced(row) for row in window]
        self._is_intact = False
        confirms: Confirms = {}
        until = asyncio.get_running_loop().time() + self._timeout_seconds
        try:
            async with asyncio.timeout_at(until):
                await self._write(window, confirms)
        except BROKER_ERRORS as error:
            return PublishResult(outage=error)
        outcome = _outcome(confirms, await self._wait(list(confirms.values()), until=until))
        self._is_intact = outcome.outage is None
        return outcome

    async def _write(self, window: Sequence[OutboxRow], confirms: Confirms) -> None:
        """Encode all events of *window*, write them together, and add their futures to *confirms*.

        aiormq's basic_publish does this for one message, with a task, a lock and a timeout. Used for every
        message, it halved the rate of the relay. The attributes of aiormq's channel are undocumented, so
        pyproject.toml bounds aiormq's version.

        The broker numbers the messages of a channel 1, 2, 3, … as they arrive, and confirms them by number.
        aiormq finds the future of a number in `confirmations`. So each message gets the next `delivery_tag`,
        under which its future is stored. The channel's lock is held until all messages are in the write
        queue. After an error the channel must be closed, because numbered messages may never be sent.
        """
        channel, loop = self._channel, asyncio.get_running_loop()
        payload = []
        async with channel.lock:
            for row in window:
                confirms[row.id] = confirm = loop.create_future()
                event_id = row.event_id
                try:
                    written = amqp_frames.encode_event(
                        row,
                        event_id,
                        exchange=self._exchange,
                        channel=channel.number,
                        longest_body=channel.max_content_size,
                    )
                except amqp_frames.UNENCODABLE as error:
                    confirm.set_exception(error)
                    continue
                payload.append(written)
                channel.delivery_tag += 1
                channel.confirmations[channel.delivery_tag] = confirm
                # RabbitMQ returns a message with its event id, which occurs only once in a window.
                channel.message_id_delivery_tag[event_id] = channel.delivery_tag
            await channel.write_queue.put(ChannelFrame(payload=b"".join(payload), should_close=False))

    async def _wait(self, confirms: Sequence[asyncio.Future[Any]], *, until: float) -> Exception | None:
        """Wait for all confirms, at most until the deadline. Stop if the channel closes, and return why.

        If confirms are missing then, they are cancelled, and the channel must not be used again.
        """
        closing = self._channel.closing  # A closed channel does not complete the confirms.
        confirming = asyncio.create_task(asyncio.wait(confirms))
        try:
            left = until - asyncio.get_running_loop().time()
            await asyncio.wait([confirming, closing], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await asyncio.wait(confirms, timeout=_CLOSING_SECONDS)
        finally:
            for each in (*confirms, confirming, closing):
                each.cancel()
            self._channel.message_id_delivery_tag.clear()  # A late return belongs to no window.
        if closing.cancelled():
            return None
        reason = closing.exception()  # CancelledError if aiormq has stopped reading
        return reason if isinstance(reason, Exception) else BrokerUnavailable("the connection is closed")


def _traced(row: OutboxRow) -> OutboxRow:
    """Return the event with the traceparent of a new publish span, the parent of its consumers' spans.

    The span ends at once, because all events of a window are published together.
    """
    destination = f"{topology.REQUESTS}:{row.type}"
    with tracing.span(
        f"publish {destination}",
        "producer",
        lambda: {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "publish",
            "messaging.operation.type": "send",
            "messaging.destination.name": destination,
            "messaging.rabbitmq.destination.routing_key": row.type,
            "messaging.message.id": row.event_id,
        },
        parent=row.traceparent,
    ):
        return msgspec.structs.replace(row, traceparent=tracing.onward(row.traceparent))


def _outcome(confirms: Confirms, reason: Exception | None) -> PublishResult:
    confirmed = set()
    failed: dict[int, str] = {}
    unencodable = set()
    outage: Exception | None = None
    for row_id, confirm in confirms.items():
        if confirm.cancelled():
            outage = outage or reason or TimeoutError("not confirmed in time")
            continue
        match confirm.exception():
            case None:
                confirmed.add(row_id)
            case PublishError():
                failed[row_id] = "returned: no queue is bound for it"
            case DeliveryError():
                failed[row_id] = "refused by the broker"
            case error if isinstance(error, amqp_frames.UNENCODABLE):  # The event has no delivery tag.
                failed[row_id] = f"unencodable: {error}"
                unencodable.add(row_id)
            case Exception() as error:
                outage = error
    return PublishResult(frozenset(confirmed), failed, frozenset(unencodable), outage)
