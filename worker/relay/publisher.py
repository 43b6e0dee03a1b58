"""A window of confirmed, persistent publishes on one channel."""

import asyncio
import struct
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Any, cast

import aiormq
import msgspec
from aio_pika import DeliveryMode
from aio_pika.abc import AbstractChannel
from aiormq import spec
from aiormq.abc import ChannelFrame
from aiormq.exceptions import DeliveryError, PublishError

from service.identifiers import uuid_of
from service.outbox import events
from service.telemetry import tracing
from worker import metrics
from worker.rabbitmq import topology
from worker.rabbitmq.alarm import Alarm
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable
from worker.relay import frames
from worker.relay.outbox import OutboxRow
from worker.waiting import rest

_NOWHERE = "relay.probe"  # a routing key that nobody binds
_CLOSING_SECONDS = 0.1  # for the confirms that had come when the channel closed
_UNENCODABLE = (ValueError, TypeError, struct.error)
_CAN_WRITE_AT_ONCE = version("aiormq").startswith("7.2.")


class Outcome(msgspec.Struct, frozen=True):
    """What became of a window. Rows in none of these were not confirmed, and count as not sent."""

    confirmed: frozenset[int] = frozenset()
    refused: Mapping[int, str] = {}  # why, of rows that were returned or nacked: a queue is at fault
    unencodable: Mapping[int, str] = {}  # why, of rows that are themselves at fault
    outage: Exception | None = None  # the channel must not be used again

    @property
    def failed(self) -> dict[int, str]:
        """Why rows were not taken, whatever is at fault."""
        return {**self.refused, **self.unencodable}


class Publisher:
    """Publishes windows of events, one at a time, to the exchange of our events."""

    def __init__(self, channel: aiormq.Channel, *, timeout_seconds: float) -> None:
        self._channel = channel
        self._timeout_seconds = timeout_seconds
        self._writes_at_once = _CAN_WRITE_AT_ONCE and not tracing.is_on()

    @classmethod
    async def on(cls, channel: AbstractChannel, *, timeout_seconds: float) -> "Publisher":
        """Return a publisher on a channel that raises on returned messages."""
        # aio-pika's own way costs half as much again: it waits for the socket after every message.
        underlay = cast("aiormq.Channel", await channel.get_underlay_channel())
        return cls(underlay, timeout_seconds=timeout_seconds)

    async def probe(self, alarm: Alarm, stop: asyncio.Event) -> None:
        """Have an empty message confirmed that goes nowhere: a broker announces its alarm to publishers only.

        Not to the exchange of our events: a queue bound to `#` there would get it. During an alarm this waits
        until *stop*; with no alarm it has the timeout. Raises BrokerUnavailable.
        """
        answered = asyncio.Event()
        probing = asyncio.create_task(
            self._channel.basic_publish(b"", exchange=topology.DEAD_LETTERS, routing_key=_NOWHERE)
        )
        probing.add_done_callback(lambda _: answered.set())
        try:
            await rest(self._timeout_seconds, answered, stop)
            while alarm.is_raised and not (answered.is_set() or stop.is_set()):
                await rest(self._timeout_seconds, answered, stop)
            if not answered.is_set():
                raise BrokerUnavailable("not confirmed in time")
            await probing
        except BROKER_ERRORS as error:
            raise BrokerUnavailable from error
        finally:
            probing.cancel()

    async def publish(
        self, window: Sequence[OutboxRow], *, abandoned: asyncio.Event | None = None
    ) -> Outcome:
        """Publish all of *window* side by side and wait for the confirms, up to the timeout or *abandoned*.

        No two rows may be of one request: a refused one would be overtaken by the next.
        """
        if not window:
            return Outcome()
        publishing: Mapping[int, asyncio.Future[Any]]
        with metrics.confirm_seconds.time(), metrics.holding(metrics.unconfirmed_events, len(window)):
            try:
                publishing = await self._write(window) if self._writes_at_once else self._start(window)
            except BROKER_ERRORS as error:
                return Outcome(outage=error)
            reason = await self._wait_for(publishing.values(), abandoned or asyncio.Event())
        return _outcome(publishing, reason)

    async def _write(self, window: Sequence[OutboxRow]) -> dict[int, asyncio.Future[Any]]:
        """Write the whole window at once, and return the confirms to wait for.

        What basic_publish does for each message, its checks and its task left out: those take longer than all
        the rest. Not documented, therefore only with the versions of aiormq that it is tested with.
        """
        channel, loop = self._channel, asyncio.get_running_loop()
        confirms: dict[int, asyncio.Future[Any]] = {}
        payload = []
        async with asyncio.timeout(self._timeout_seconds), channel.lock:
            for row in window:
                confirms[row.id] = confirm = loop.create_future()
                event_id = row.event_id
                try:
                    written = frames.encode_event(
                        row,
                        event_id,
                        channel=channel.number,
                        longest_body=channel.max_content_size,
                    )
                except _UNENCODABLE as error:
                    confirm.set_exception(error)
                    continue
                payload.append(written)
                channel.delivery_tag += 1
                channel.confirmations[channel.delivery_tag] = confirm
                channel.message_id_delivery_tag[event_id] = channel.delivery_tag  # for those returned
            await channel.write_queue.put(ChannelFrame(payload=b"".join(payload), should_close=False))
        return confirms

    def _start(self, window: Sequence[OutboxRow]) -> dict[int, asyncio.Future[Any]]:
        return {row.id: asyncio.create_task(self._publish(row)) for row in window}

    async def _publish(self, row: OutboxRow) -> None:
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
            await self._channel.basic_publish(
                row.payload,
                exchange=topology.REQUESTS,
                routing_key=row.type,
                properties=properties_of(row, tracing.onward(row.traceparent)),
                mandatory=row.type in events.MUST_BE_ROUTED,
                wait=False,  # for the socket; the confirm is waited for all the same
            )

    async def _wait_for(
        self, confirms: Collection[asyncio.Future[Any]], abandoned: asyncio.Event
    ) -> Exception | None:
        """Wait with a bound. What is unfinished then is cancelled; its channel must go too.

        Returns what closed the channel, if it did: a wait for a confirm does not end by that.
        """
        closing = self._channel.closing
        waits: list[asyncio.Future[Any]] = [
            asyncio.create_task(_until_done(confirms)),
            asyncio.create_task(abandoned.wait()),
            closing,
        ]
        try:
            await asyncio.wait(waits, timeout=self._timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await asyncio.wait(confirms, timeout=_CLOSING_SECONDS)
        finally:
            unfinished = [each for each in (*confirms, *waits) if not each.done()]
            for each in unfinished:
                each.cancel()
            self._channel.message_id_delivery_tag.clear()  # One that is returned now is nobody's.
        await asyncio.gather(*unfinished, closing, return_exceptions=True)
        if closing.cancelled():
            return None
        reason = closing.exception()  # CancelledError, if aiormq has given up its reader
        return reason if isinstance(reason, Exception) else BrokerUnavailable("the connection is gone")


async def _until_done(confirms: Collection[asyncio.Future[Any]]) -> None:
    """Wait for one after the other: most are done when their turn comes, and cost nothing."""
    for confirm in confirms:
        if not confirm.done():
            await asyncio.wait([confirm])


def properties_of(row: OutboxRow, traceparent: str | None) -> spec.Basic.Properties:
    """Return the AMQP properties of an event."""
    attributes = {"specversion": "1.0", "id": row.event_id, "source": events.SOURCE, "type": row.type}
    headers: dict[str, Any] = {f"cloudEvents:{name}": value for name, value in attributes.items()}
    headers["cloudEvents:subject"] = uuid_of(row.request_id)
    if traceparent is not None:
        headers["traceparent"] = traceparent
    headers["sequence"] = row.sequence
    return spec.Basic.Properties(
        content_type=events.CONTENT_TYPE,
        headers=headers,
        delivery_mode=DeliveryMode.PERSISTENT,
        message_id=row.event_id,
        timestamp=row.created_at,
        message_type=row.type,
    )


def _outcome(publishing: Mapping[int, asyncio.Future[Any]], reason: Exception | None) -> Outcome:
    confirmed = set()
    refused: dict[int, str] = {}
    unencodable: dict[int, str] = {}
    outage: Exception | None = None
    for row_id, confirm in publishing.items():
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
            case error if isinstance(error, _UNENCODABLE):  # before a delivery tag was spent
                metrics.events_failed.labels("unencodable").inc()
                unencodable[row_id] = f"unencodable: {error}"
            case Exception() as error:
                outage = error
    return Outcome(frozenset(confirmed), refused, unencodable, outage)
