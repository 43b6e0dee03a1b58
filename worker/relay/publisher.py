"""Publishes windows of events to RabbitMQ as persistent messages, with publisher confirms."""

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

# By row id: the future of its confirm, which fails if the event is nacked or returned.
Confirms: TypeAlias = dict[int, asyncio.Future[Any]]


class PublishResult(msgspec.Struct, frozen=True):
    """The outcome of a window, by row id. A row in none of these was not confirmed and counts as not sent."""

    confirmed: frozenset[int] = frozenset()
    failed: Mapping[int, str] = {}  # with the reason: refused by the broker, or unencodable
    unencodable: frozenset[int] = frozenset()  # failed without being sent: no queue is at fault
    outage: Exception | None = None  # The channel must not be used again.


class Publisher:
    """Publishes windows of events to the exchange, one window at a time."""

    def __init__(self, channel: aiormq.Channel, *, timeout_seconds: float) -> None:
        self._channel = channel
        self._timeout_seconds = timeout_seconds

    @classmethod
    async def on(cls, channel: AbstractChannel, *, timeout_seconds: float) -> "Publisher":
        """Return a publisher on a channel that raises on returned messages."""
        # aio-pika's own publish costs half as much again, because it waits for the socket each time.
        underlay = cast("aiormq.Channel", await channel.get_underlay_channel())
        return cls(underlay, timeout_seconds=timeout_seconds)

    async def probe(self, alarm: Alarm, stop: asyncio.Event) -> None:
        """Publish two empty messages that no queue gets: the broker reports an alarm only to publishers.

        During an alarm RabbitMQ confirms the first, and then reads no more from the connection. This waits
        until the alarm ends or *stop*. Without an alarm it waits up to the timeout for each message. Raises
        BrokerUnavailable. On the exchange of the events, a queue bound to `#` would get the messages.
        """
        for _ in range(2):
            await self._probe_once(alarm, stop)

    async def _probe_once(self, alarm: Alarm, stop: asyncio.Event) -> None:
        answered = asyncio.Event()
        probing = asyncio.create_task(
            self._channel.basic_publish(b"", exchange=topology.DEAD_LETTERS, routing_key=_UNBOUND_KEY)
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
        """Publish all of *window* at once, and wait for the confirms. Both share the timeout.

        No two rows may belong to one request: if the first were refused, the second would overtake it.
        """
        if not window:
            return PublishResult()
        if tracing.is_on():
            window = [_traced(row) for row in window]
        confirms: Confirms = {}
        until = asyncio.get_running_loop().time() + self._timeout_seconds
        try:
            async with asyncio.timeout_at(until):
                await self._write(window, confirms)
        except BROKER_ERRORS as error:
            return PublishResult(outage=error)
        return _outcome(confirms, await self._wait(list(confirms.values()), until=until))

    async def _write(self, window: Sequence[OutboxRow], confirms: Confirms) -> None:
        """Encode all rows, write them at once, and add their *confirms*.

        This does for a window what aiormq's basic_publish does for one message. The task, lock and timeout
        that it takes for each message halved the rate of the relay. The attributes of aiormq's channel are
        undocumented, so pyproject.toml bounds its version.

        The broker numbers the messages of a channel 1, 2, 3, … as they arrive, and confirms them by number.
        aiormq looks up a number's future in `confirmations`. So each message takes the next `delivery_tag`
        and registers its future under it. The channel's lock is held until all are in the write queue. If
        this fails, messages that may never be sent have taken numbers, so the channel must be closed.
        """
        channel, loop = self._channel, asyncio.get_running_loop()
        payload = []
        async with channel.lock:
            for row in window:
                confirms[row.id] = confirm = loop.create_future()
                event_id = row.event_id
                try:
                    written = amqp_frames.encode_event(
                        row, event_id, channel=channel.number, longest_body=channel.max_content_size
                    )
                except amqp_frames.UNENCODABLE as error:
                    confirm.set_exception(error)
                    continue
                payload.append(written)
                channel.delivery_tag += 1
                channel.confirmations[channel.delivery_tag] = confirm
                # A return has only the event id. It is unique, because a window has one event per request.
                channel.message_id_delivery_tag[event_id] = channel.delivery_tag
            await channel.write_queue.put(ChannelFrame(payload=b"".join(payload), should_close=False))

    async def _wait(self, confirms: Sequence[asyncio.Future[Any]], *, until: float) -> Exception | None:
        """Wait for all confirms, until the deadline or until the channel closes. Return why it closed.

        Confirms that are then missing are cancelled, and the channel must not be used again.
        """
        closing = self._channel.closing  # Its end does not complete the confirms.
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
        reason = closing.exception()  # CancelledError if aiormq has given up its reader
        return reason if isinstance(reason, Exception) else BrokerUnavailable("the connection is closed")


def _traced(row: OutboxRow) -> OutboxRow:
    """Return the event with a new publish span, which becomes the parent of its consumers' spans.

    The span ends at once, because the many events of a window are published at one time.
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
            outage = outage or reason or BrokerUnavailable("not confirmed in time")
            continue
        match confirm.exception():
            case None:
                confirmed.add(row_id)
            case PublishError():
                failed[row_id] = "returned: no queue is bound for it"
            case DeliveryError():
                failed[row_id] = "refused by the broker"
            case error if isinstance(error, amqp_frames.UNENCODABLE):  # before it took a delivery tag
                failed[row_id] = f"unencodable: {error}"
                unencodable.add(row_id)
            case Exception() as error:
                outage = error
    return PublishResult(frozenset(confirmed), failed, frozenset(unencodable), outage)
