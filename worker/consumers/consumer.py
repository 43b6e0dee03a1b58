"""Reads one queue: decodes, handles and settles each message."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from structlog.contextvars import bound_contextvars

from service import json_faults
from service.postgres.outages import PostgresUnavailable
from service.postgres.schema import SchemaOutdated
from service.server.background import in_background
from service.server.probes import NotReady
from service.telemetry import logs, tracing
from service.telemetry.tracing import Attributes
from worker import metrics
from worker.batches import Batches, Outcomes, RowLocked
from worker.consumers.acknowledging import Acknowledgements
from worker.consumers.dead_letter_count import counting
from worker.consumers.dead_lettering import dead_letter
from worker.consumers.topic import safe_id, topic_of
from worker.rabbitmq import topology
from worker.rabbitmq.connection import (
    BROKER_ERRORS,
    CLOSE_SECONDS,
    BrokerUnavailable,
    TopologyDiffers,
    open_channel,
    open_role,
)
from worker.rabbitmq.topology import Queue
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most, wait_for_first

Content = TypeVar("Content")

NO_UUID = "Expected the uuid of a request"

_RETRY_SECONDS = 1.0  # before a message whose handler failed is requeued

_log = structlog.get_logger()


_OUTAGES: tuple[type[Exception], ...] = (
    BrokerUnavailable,
    PostgresUnavailable,
    SchemaOutdated,
    *BROKER_ERRORS,
)


class Delivered(NamedTuple, Generic[Content]):
    """The content of a message, and the traceparent to pass on: its own, or that of a new trace."""

    content: Content
    traceparent: str | None


class Malformed(Exception):
    """The message is not what this queue carries."""

    def __init__(self, reason: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {reason}" if field else reason)

    @classmethod
    def because(cls, error: Exception, body: bytes) -> "Malformed":
        """Return what one of `json_faults.UNREADABLE` says of *body*, naming the field but no value."""
        if isinstance(error, msgspec.ValidationError):
            field, reason = json_faults.locate(error)
            return cls(reason, field=field)
        return cls(f"not readable JSON: {json_faults.why_unreadable(body, error)}")


class _ChannelLeft(Exception):
    """The consumer is leaving its channel: nothing more may be handled."""


class _Reading(NamedTuple):
    """One channel of a consumer, and how its messages are settled: delivery tags begin anew on each."""

    dead_letters: AbstractChannel
    acknowledgements: Acknowledgements
    leaving: asyncio.Event  # Nothing more may be handled on this channel.


class Consumer(Generic[Content]):
    """Reads one queue: decodes each message, passes it to the handler, and settles it by hand.

    The handler gets messages in batches, and returns an outcome for each: see `Batches`. *refusals* are the
    outcomes that no retry can change: the message is dead-lettered, with the reason in its headers. While
    Postgres is down, the messages in hand wait for it, and *dependency*, which then raises
    PostgresUnavailable, keeps the queue from being opened.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        queue: Queue,
        *,
        decode: Callable[[bytes], Content],
        handle: Callable[[Sequence[Delivered[Content]]], Awaitable[Outcomes]],
        refusals: tuple[type[Exception], ...],
        dependency: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._queue = queue
        # The name of a consumer's destination in OpenTelemetry's conventions for RabbitMQ.
        self._destination = f"{queue.exchange}:{queue.routing_key}:{queue.name}"
        self._decode = decode
        self._batches = Batches(handle)
        self._refusals: tuple[type[Exception], ...] = (Malformed, *refusals)
        self._dependency = dependency
        self._deliveries: set[asyncio.Task[None]] = set()
        self._consuming = False
        self._obstacle = ""
        self._seconds = metrics.consumer_seconds.labels(queue.name)
        self._outcomes = {
            outcome: metrics.consumer_messages.labels(queue.name, outcome)
            for outcome in ("handled", "dead_lettered", "returned")
        }
        metrics.consumer_reading.labels(queue.name).set_function(lambda: self._consuming)

    async def check(self) -> None:
        """Raise NotReady unless the queue is being read."""
        if not self._consuming:
            raise NotReady(self._obstacle or f"not reading {self._queue.name}")

    async def run(self, stop: asyncio.Event) -> None:
        """Consume until *stop*, through every outage of RabbitMQ and Postgres."""
        pauses = Pauses("consumer_paused", longest_seconds=self._settings.longest_outage_pause_seconds)
        name = self._queue.name
        needs = [name, self._queue.exchange, topology.DEAD_LETTERS]
        while not stop.is_set():
            try:
                await self._dependency()
                # Dead letters have a connection of their own: see `dead_letter`.
                async with (
                    in_background(name, self._batches.run),
                    open_role(self._settings, name=name, needs=needs) as channel,
                    open_channel(self._settings, name=self._queue.dead_letters) as dead_letters,
                ):
                    await self._consume(channel, dead_letters, pauses, stop)
            except _OUTAGES as error:
                self._obstacle = str(error) if isinstance(error, TopologyDiffers) else ""
                await pauses.log_and_wait(error, stop)

    async def _consume(
        self, channel: AbstractChannel, dead_letters: AbstractChannel, pauses: Pauses, stop: asyncio.Event
    ) -> None:
        """Consume on one channel until *stop*. Raises BrokerUnavailable when that becomes impossible."""
        leaving = asyncio.Event()
        reading = _Reading(dead_letters, Acknowledgements(partial(_give_up, leaving)), leaving)
        for each in (channel, dead_letters):
            each.close_callbacks.add(lambda *_: leaving.set())
        underlay = await channel.get_underlay_channel()
        underlay.on_consumer_cancel_callbacks.add(lambda _: leaving.set())
        async with asyncio.timeout(self._settings.broker_timeout_seconds):
            await channel.set_qos(prefetch_count=self._settings.consumer_prefetch)
            queue = await channel.get_queue(self._queue.name, ensure=False)
            tag = await queue.consume(partial(self._receive, reading))
        self._consuming = True
        pauses.reset()
        _log.info("consumer_started", queue=self._queue.name)
        try:
            async with counting(channel, self._queue, answer_seconds=self._settings.broker_timeout_seconds):
                await wait_for_first(leaving, stop)
            if leaving.is_set():
                raise BrokerUnavailable("a channel or the consumer is lost, or a message was not settled")
            await queue.cancel(tag, timeout=CLOSE_SECONDS)
        finally:
            self._consuming = False
            await self._finish_deliveries(reading)

    async def _finish_deliveries(self, reading: _Reading) -> None:
        """Wait for the deliveries in hand, with a bound; those not settled by then return to the queue."""
        if self._deliveries:
            await asyncio.wait(self._deliveries, timeout=self._settings.finish_seconds)
        reading.leaving.set()
        for delivery in self._deliveries:
            delivery.cancel()
        await asyncio.gather(*self._deliveries, return_exceptions=True)
        await reading.acknowledgements.finish()

    async def _receive(self, reading: _Reading, message: AbstractIncomingMessage) -> None:
        """Start a delivery, in a task that outlives the channel: aio-pika cancels its own when one closes."""
        reading.acknowledgements.add(message)
        delivery = asyncio.create_task(self._deliver(reading, message))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    async def _deliver(self, reading: _Reading, message: AbstractIncomingMessage) -> None:
        """Handle and settle one message, and count the outcome."""
        outcome = "returned"
        topic = topic_of(message.body)
        incoming = tracing.accept(message.headers.get("traceparent")) or topic.traceparent
        with (
            self._seconds.time(),
            tracing.span(
                f"process {self._destination}",
                "consumer",
                lambda: self._describe(message),
                parent=incoming,
            ),
        ):
            traceparent = tracing.onward(incoming)
            about = logs.about(topic.uuid, traceparent)
            if topic.calculation_id is not None:
                about["calculation_id"] = topic.calculation_id
            with bound_contextvars(queue=self._queue.name, message_id=safe_id(message.message_id), **about):
                try:
                    outcome = await self._handle_and_settle(reading, message, traceparent)
                except Exception as error:  # noqa: BLE001 - left unsettled, it would use up prefetch for good
                    _give_up(reading.leaving, error)
                finally:
                    tracing.describe({}, failed=outcome != "handled")
                    self._outcomes[outcome].inc()

    async def _handle_and_settle(
        self, reading: _Reading, message: AbstractIncomingMessage, traceparent: str
    ) -> str:
        """Handle one message, and settle it by how that ended. Returns the outcome, as the metrics name it.

        The acknowledgement of a handled message is written soon afterwards. If it fails, or the error of
        another way to settle a message is raised here, the channel is left: closing it returns the message.
        """
        try:
            delivered = Delivered(self._decode(message.body), traceparent)
            await self._handle_through_outages(delivered, reading.leaving)
        except self._refusals as refusal:
            await dead_letter(
                reading.dead_letters,
                message,
                self._queue,
                refusal,
                seconds=self._settings.broker_timeout_seconds,
            )
            reading.acknowledgements.forget(message)
            return "dead_lettered"
        except _ChannelLeft:
            _log.info("message_left_to_the_queue")  # Closing the channel returns it.
            return "returned"
        except Exception as error:  # noqa: BLE001 - an unforeseen error must not lose the message
            _log.error("message_failed", **logs.describe(error))
            await wait_at_most(_RETRY_SECONDS, reading.leaving)
            # The delivery limit ends the repetition. It does not count every nack, but every reject.
            await message.reject(requeue=True)
            reading.acknowledgements.forget(message)
            return "returned"
        reading.acknowledgements.acknowledge(message)
        _log.info("message_handled")
        return "handled"

    async def _handle_through_outages(self, delivered: Delivered[Content], leaving: asyncio.Event) -> None:
        """Have a message handled, again while Postgres is down or a row is locked: a requeue would count.

        Raises _ChannelLeft instead of having it handled on a channel that is being left.
        """
        pauses = Pauses("message_waits_for_postgres", longest_seconds=1.0, shortest_seconds=0.005)
        while not leaving.is_set():
            try:
                return await self._batches.done(delivered)
            except (PostgresUnavailable, RowLocked) as error:
                await pauses.log_and_wait(error, leaving)
        raise _ChannelLeft

    def _describe(self, message: AbstractIncomingMessage) -> Attributes:
        message_id = safe_id(message.message_id)
        return {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": self._destination,
            "messaging.rabbitmq.destination.routing_key": self._queue.routing_key,
        } | ({"messaging.message.id": message_id} if message_id else {})


def _give_up(leaving: asyncio.Event, error: Exception) -> None:
    """Log why a message was not settled, and leave the channel: closing it returns the message."""
    leaving.set()
    if isinstance(error, BROKER_ERRORS):
        _log.warning("message_not_settled", error=logs.summarize(error))
    else:
        _log.error("message_not_settled", **logs.describe(error))
