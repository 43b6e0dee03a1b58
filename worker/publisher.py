"""A window of confirmed, persistent publishes on one channel."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractExchange
from aiormq.exceptions import DeliveryError, PublishError
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from service import events
from service.identifiers import uuid_of
from service.outbox import OutboxRow
from worker import topology
from worker.alarm import Alarm
from worker.broker import BROKER_ERRORS, BrokerUnavailable
from worker.outages import rest

_NOWHERE = "relay.probe"  # a routing key that nobody binds


class Outcome(msgspec.Struct, frozen=True):
    """What became of a window. Rows in neither set were not confirmed, and count as not sent."""

    confirmed: frozenset[int]
    failed: Mapping[int, str]  # a reason for each row that is itself at fault
    outage: Exception | None = None  # the channel must not be used again


class Unencodable(Exception):
    """The event does not fit into an AMQP message."""


class Publisher:
    """Publishes windows of events, one at a time, to the exchange of our events."""

    def __init__(
        self, exchange: AbstractExchange, direct_exchange: AbstractExchange, *, timeout_seconds: float
    ) -> None:
        self._exchange = exchange
        self._direct_exchange = direct_exchange
        self._timeout_seconds = timeout_seconds

    @classmethod
    async def on(cls, channel: AbstractChannel, *, timeout_seconds: float) -> "Publisher":
        """Return a publisher on a channel that raises on returned messages."""
        exchange = await channel.get_exchange(topology.REQUESTS, ensure=False)
        direct_exchange = await channel.get_exchange(topology.DEAD_LETTERS, ensure=False)
        return cls(exchange, direct_exchange, timeout_seconds=timeout_seconds)

    async def probe(self, alarm: Alarm, stop: asyncio.Event) -> None:
        """Have an empty message confirmed that goes nowhere: a broker with an alarm tells only publishers.

        Not to the exchange of our events: who binds `#` there would hear it. During an alarm this waits until
        *stop*; with no alarm it has the timeout. Raises BrokerUnavailable.
        """
        answered = asyncio.Event()
        probing = asyncio.create_task(self._direct_exchange.publish(Message(b""), _NOWHERE, mandatory=False))
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
        failed: dict[int, str] = {}
        publishing: dict[int, asyncio.Task[object]] = {}
        for row in window:
            try:
                message = encode(row)
            except Unencodable as error:
                failed[row.id] = str(error)
                continue
            mandatory = row.type in events.MUST_BE_ROUTED
            publishing[row.id] = asyncio.create_task(
                self._exchange.publish(message, row.type, mandatory=mandatory)
            )
        await self._wait_for(publishing.values(), abandoned or asyncio.Event())
        return _outcome(publishing, failed)

    async def _wait_for(self, tasks: Collection[asyncio.Task[object]], abandoned: asyncio.Event) -> None:
        """Wait with a bound. What is unfinished then is cancelled; its channel must go too."""
        waits: list[asyncio.Future[Any]] = [
            asyncio.gather(*tasks, return_exceptions=True),
            asyncio.create_task(abandoned.wait()),
        ]
        try:
            await asyncio.wait(waits, timeout=self._timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, waits[1]):
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def encode(row: OutboxRow) -> Message:
    """Return the AMQP message of an event. Raises Unencodable, before a delivery tag is spent on it."""
    attributes = {"specversion": "1.0", "id": row.event_id, "source": events.SOURCE, "type": row.type}
    headers = {f"cloudEvents:{name}": value for name, value in attributes.items()}
    headers["cloudEvents:subject"] = uuid_of(row.request_id)
    if row.traceparent is not None:
        headers["traceparent"] = row.traceparent
    message = Message(
        row.payload,
        message_id=row.event_id,
        type=row.type,
        content_type=events.CONTENT_TYPE,
        delivery_mode=DeliveryMode.PERSISTENT,
        timestamp=row.created_at,
        headers={**headers, "sequence": row.sequence},
    )
    try:
        Basic.Publish(routing_key=row.type).marshal()
        ContentHeader(properties=message.properties, body_size=len(row.payload)).marshal()
    except (ValueError, TypeError, UnicodeError) as error:
        raise Unencodable(f"unencodable: {error}") from error
    return message


def _outcome(publishing: Mapping[int, asyncio.Task[object]], failed: dict[int, str]) -> Outcome:
    confirmed = set()
    outage: Exception | None = None
    for row_id, task in publishing.items():
        if task.cancelled():
            outage = outage or BrokerUnavailable("not confirmed in time")
            continue
        match task.exception():
            case None:
                confirmed.add(row_id)
            case PublishError():
                failed[row_id] = "returned: no queue is bound for it"
            case DeliveryError():
                failed[row_id] = "refused by the broker"
            case Exception() as error:
                outage = error
    return Outcome(frozenset(confirmed), failed, outage)
