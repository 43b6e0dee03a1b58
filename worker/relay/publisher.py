"""Publishes windows of events to RabbitMQ as persistent messages, with publisher confirms."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import aiormq
import msgspec
from aio_pika.abc import AbstractChannel
from aiormq.exceptions import DeliveryError, PublishError

from service.telemetry import tracing
from worker import metrics
from worker.rabbitmq import topology
from worker.rabbitmq.alarm import Alarm
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable
from worker.relay.confirm_window import UNENCODABLE, ConfirmWindow
from worker.relay.outbox import OutboxRow
from worker.waiting import wait_at_most

_UNBOUND_KEY = "relay.probe"


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a window, by row id. A row in none of these was not confirmed and counts as not sent."""

    confirmed: frozenset[int] = frozenset()
    refused: Mapping[int, str] = {}  # with the reason
    unencodable: frozenset[int] = frozenset()  # those of the refused that were not sent: no queue is at fault
    outage: Exception | None = None  # The channel must not be used again.


class Publisher:
    """Publishes windows of events to the exchange, one window at a time."""

    def __init__(self, channel: aiormq.Channel, *, timeout_seconds: float) -> None:
        self._channel = channel
        self._timeout_seconds = timeout_seconds

    @classmethod
    async def on(cls, channel: AbstractChannel, *, timeout_seconds: float) -> "Publisher":
        """Return a publisher on a channel that raises on returned messages."""
        # aio-pika's own publish costs half as much again: it waits for the socket after every message.
        underlay = cast("aiormq.Channel", await channel.get_underlay_channel())
        return cls(underlay, timeout_seconds=timeout_seconds)

    async def probe(self, alarm: Alarm, stop: asyncio.Event) -> None:
        """Publish an empty message that no queue gets: the broker reports an alarm only to publishers.

        It does not go to the exchange of the events, where a queue bound to `#` would get it. During an alarm
        this waits until *stop*, otherwise up to the timeout. Raises BrokerUnavailable.
        """
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

    async def publish(self, window: Sequence[OutboxRow], *, abandoned: asyncio.Event) -> Outcome:
        """Publish all of *window* side by side and wait for the confirms, up to the timeout or *abandoned*.

        No two rows may be of one request: if the first were refused, the second would overtake it.
        """
        if not window:
            return Outcome()
        if tracing.is_on():
            window = [_traced(row) for row in window]
        publishing = ConfirmWindow(self._channel)
        with metrics.confirm_seconds.time(), metrics.showing(metrics.unconfirmed_events, len(window)):
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    await publishing.write(window)
            except BROKER_ERRORS as error:
                return Outcome(outage=error)
            reason = await publishing.wait(seconds=self._timeout_seconds, abandoned=abandoned)
        return _outcome(publishing.confirms, reason)


def _traced(row: OutboxRow) -> OutboxRow:
    """Return the event with its publish, a span of its own, as the parent of what its consumers do.

    The span ends at once: the window of many events has but one time, which relay_confirm_seconds shows.
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


def _outcome(confirms: Mapping[int, asyncio.Future[Any]], reason: Exception | None) -> Outcome:
    confirmed = set()
    refused: dict[int, str] = {}
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
                metrics.events_failed.labels("returned").inc()
                refused[row_id] = "returned: no queue is bound for it"
            case DeliveryError():
                metrics.events_failed.labels("refused").inc()
                refused[row_id] = "refused by the broker"
            case error if isinstance(error, UNENCODABLE):  # before it took a delivery tag
                metrics.events_failed.labels("unencodable").inc()
                refused[row_id] = f"unencodable: {error}"
                unencodable.add(row_id)
            case Exception() as error:
                outage = error
    return Outcome(frozenset(confirmed), refused, frozenset(unencodable), outage)
