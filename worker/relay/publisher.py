"""Publishes events in windows. The events of a window are sent together, then all confirms are awaited."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import aiormq
import msgspec
from aio_pika import DeliveryMode
from aiormq import spec
from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError, DeliveryError, PublishError

from service.outbox import events
from service.telemetry import tracing
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BLOCKED, BROKER_ERRORS, BrokerUnavailable
from worker.rabbitmq.window import Message, wait, write
from worker.relay.pointers import OutboxEvent

_UNBOUND_KEY = "relay.probe"
_NACKED = "refused by the broker"
_READY_SECONDS = 0.1
# A channel on which events are refused is replaced, with its connection, once it is this old. After the loss
# of a queue's leader, RabbitMQ 3.10 may refuse all that the channel publishes to the queue, until the lost
# node is back. A new channel works. If the queue is only full, the replacement is in vain.
_REFUSING_SECONDS = 5.0


class PublishResult(msgspec.Struct, frozen=True):
    """The outcome of a window, by event id.

    An event neither confirmed nor failed stays in the outbox, and is published again. It may have been sent.
    """

    confirmed: frozenset[str] = frozenset()
    failed: Mapping[str, str] = {}  # the reason by event id
    outage: Exception | None = None  # If it is set, the channel must not be used again.


class Publisher:
    """Publishes windows of events to an exchange, one window at a time.

    The channel is the underlay channel of one that was opened with confirms and on_return_raises.
    """

    def __init__(
        self, channel: AbstractChannel, *, timeout_seconds: float, exchange: str = topology.REQUESTS
    ) -> None:
        self._is_intact = True  # not after an outage, a cancelled publish, or refusals over some seconds
        self._opened = asyncio.get_running_loop().time()
        self._channel = cast("aiormq.Channel", channel)
        self._exchange = exchange
        self._timeout_seconds = timeout_seconds

    @property
    def is_usable(self) -> bool:
        """Whether the channel may publish another window."""
        return self._is_intact and not self._channel.is_closed

    async def probe(self, exchange: str = topology.NOTIFICATIONS_ALONE) -> None:
        """Publish two empty messages that no queue gets. Raises BrokerUnavailable unless both are confirmed.

        RabbitMQ reports an alarm only after a publish: it confirms the first message, then reads no more. On
        the exchange of the events, a team's queue that is bound to `#` would get them.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                for _ in range(2):
                    await self._channel.basic_publish(b"", exchange=exchange, routing_key=_UNBOUND_KEY)
        except BROKER_ERRORS as error:
            raise BrokerUnavailable(BLOCKED if await self._is_blocked(error) else "") from error

    async def publish(self, window: Sequence[OutboxEvent]) -> PublishResult:
        """Publish all events of *window* together, and wait for their confirms, within one timeout.

        No two events may belong to one request: if the first were refused, the second would overtake it.
        After an outage or a cancellation the channel is not used again: some messages may be unsent.
        """
        if not window:
            return PublishResult()
        if tracing.is_on():
            window = [_traced(row, self._exchange) for row in window]
        self._is_intact = False
        began = asyncio.get_running_loop().time()
        until = began + self._timeout_seconds
        try:
            async with asyncio.timeout_at(until):
                confirms = await write(self._channel, [self._message(row) for row in window])
        except BROKER_ERRORS as error:
            result = PublishResult(outage=error)
        else:
            reason = await wait(self._channel, confirms, until=until)
            result = _result(window, confirms, reason)
        if await self._is_blocked(result.outage):
            return msgspec.structs.replace(result, outage=BrokerUnavailable(BLOCKED))
        is_refusing = _NACKED in result.failed.values() and began > self._opened + _REFUSING_SECONDS
        self._is_intact = result.outage is None and not is_refusing
        return result

    async def _is_blocked(self, error: Exception | None) -> bool:
        """Whether *error* is a timeout, and its cause is an alarm, which RabbitMQ reports after a publish.

        While RabbitMQ is short of memory or disk, it reads nothing from publishing connections. aiormq raises
        no error then. It logs RabbitMQ's reason, and its `ready` waits until the alarm has ended.
        """
        if isinstance(error, TimeoutError):
            try:
                async with asyncio.timeout(_READY_SECONDS):
                    await self._channel.connection.ready()
            except TimeoutError:
                return True
        return False

    def _message(self, row: OutboxEvent) -> Message:
        properties = spec.Basic.Properties(
            content_type=events.CONTENT_TYPE,
            headers=events.headers(row.event_id, row.type, row.sequence, row.traceparent),
            delivery_mode=DeliveryMode.PERSISTENT,
            message_id=row.event_id,
            timestamp=row.time,
            message_type=row.type,
        )
        mandatory = row.type == topology.NOTIFICATIONS.routing_key  # Others may have no subscriber.
        publish = spec.Basic.Publish(exchange=self._exchange, routing_key=row.type, mandatory=mandatory)
        return Message(publish, properties, row.payload)


def _traced(row: OutboxEvent, exchange: str) -> OutboxEvent:
    """Return the event with the traceparent of a new publish span, the parent of its consumers' spans.

    The span ends at once, because all events of a window are published together.
    """
    destination = f"{exchange}:{row.type}"
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


def _result(
    window: Sequence[OutboxEvent], confirms: Sequence[asyncio.Future[Any]], reason: Exception | None
) -> PublishResult:
    confirmed = set()
    failed: dict[str, str] = {}
    outage: Exception | None = None
    for row, confirm in zip(window, confirms, strict=True):
        if confirm.cancelled():
            outage = outage or reason or TimeoutError("not confirmed in time")
            continue
        match confirm.exception():
            case None:
                confirmed.add(row.event_id)
            case PublishError():
                failed[row.event_id] = "returned: no queue is bound for it"
            case DeliveryError():
                failed[row.event_id] = _NACKED
            case AMQPError() as error:
                outage = error
            case error:  # AMQP cannot carry the event. The service writes no such event.
                failed[row.event_id] = f"refused by AMQP: {error}"
    return PublishResult(frozenset(confirmed), failed, outage)
