"""Reads one queue: decodes, handles and settles each message."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Generic, TypeVar

import structlog
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from opentelemetry.trace import StatusCode
from structlog.contextvars import bound_contextvars

from service.postgres import connections, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.postgres.schema import SchemaOutdated
from service.server.probes import NotReady
from service.telemetry import logs, tracing
from service.telemetry.tracing import Attributes
from worker import metrics
from worker.batches import Batches, Failures, process_with_retries
from worker.consumers import incoming
from worker.consumers.dead_lettering import dead_letter, publish_letters
from worker.consumers.incoming import Incoming, Malformed, safe_id
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS, CLOSE_SECONDS, BrokerUnavailable, open_role
from worker.rabbitmq.message_properties import UNDECODABLE
from worker.rabbitmq.topology import Queue
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

Content = TypeVar("Content")

_RETRY_SECONDS = 1.0  # after a handler's failure, before the message is requeued
_FINISH_SHARE = 0.5  # of SHUTDOWN_SECONDS, for in-flight messages. The rest is for closing connections.
_OUTAGES = (BrokerUnavailable, PostgresUnavailable, SchemaOutdated, *BROKER_ERRORS)

_log = structlog.get_logger()


class Consumer(Generic[Content]):
    """Reads one queue: decodes each message, records it, and settles it.

    *decode* gets the message and the traceparent to pass on. *record* gets decoded messages in batches, in a
    transaction, and returns a failure or None for each: see `Batches`. It raises no failure, because the
    batch would be rolled back, and a refusal would not wait for a standby. *committed* is called after each
    commit. A message whose failure is in *refusals* is dead-lettered with the reason.

    While Postgres is down, in-flight messages wait. If the channel is lost meanwhile, as it is after
    RabbitMQ's consumer_timeout, half an hour by default, RabbitMQ returns them to the queue, and the next
    delivery counts towards the delivery limit. So the queue is read again only when Postgres commits.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        queue: Queue,
        pool: Pool,
        *,
        decode: Callable[[Incoming, str], Content],
        record: Callable[[Connection, Sequence[Content]], Awaitable[Failures]],
        committed: Callable[[], None],
        refusals: tuple[type[Exception], ...],
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._transaction = partial(connections.transaction, pool, seconds=settings.work_timeout_seconds)
        # The name of a consumer's destination in OpenTelemetry's conventions for RabbitMQ.
        self._destination = f"{queue.exchange}:{queue.routing_key}:{queue.name}"
        self._span = f"process {self._destination}"
        self._decode = decode
        self._record = record
        self._committed = committed
        self._batches = Batches(self._record_batch)
        self._letters = Batches(partial(publish_letters, settings, queue))
        self._refusals: tuple[type[Exception], ...] = (Malformed, *refusals)
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
        """Consume until *stop*. Resume after every outage of RabbitMQ or Postgres."""
        pauses = Pauses("consumer_paused")
        name = self._queue.name
        needs = [name, self._queue.exchange, topology.DEAD_LETTERS]
        while not stop.is_set():
            try:
                async with self._transaction() as connection:  # A read succeeds even if commits cannot.
                    await schema.check(connection)
                    await connection.execute(f"SELECT {connections.REPLICATE}")
                async with open_role(self._settings, name=name, needs=needs) as channel:
                    await self._consume(channel, pauses, stop)
            except _OUTAGES as error:
                self._obstacle = str(error) if isinstance(error, BrokerUnavailable) else ""
                await wait_at_most(pauses.log(error, obstacle=self._obstacle), stop)

    async def _consume(self, channel: AbstractChannel, pauses: Pauses, stop: asyncio.Event) -> None:
        """Consume on one channel until *stop*. Raises BrokerUnavailable when the channel is unusable."""
        leaving = asyncio.Event()  # The channel must be closed, which requeues in-flight messages.
        deliveries: set[asyncio.Task[None]] = set()  # The prefetch bounds the number.

        async def receive(message: AbstractIncomingMessage) -> None:
            # In our own task, because aio-pika cancels its tasks when the channel closes.
            delivery = asyncio.create_task(self._deliver(message, leaving))
            deliveries.add(delivery)
            delivery.add_done_callback(deliveries.discard)

        channel.close_callbacks.add(lambda *_: leaving.set())
        underlay = await channel.get_underlay_channel()
        underlay.on_consumer_cancel_callbacks.add(lambda _: leaving.set())
        async with asyncio.timeout(self._settings.broker_timeout_seconds):
            await channel.set_qos(prefetch_count=self._settings.consumer_prefetch)
            queue = await channel.get_queue(self._queue.name, ensure=False)
            tag = await queue.consume(receive)
        self._consuming = True
        pauses.reset()
        _log.info("consumer_started", queue=self._queue.name)
        try:
            await wait_at_most(None, leaving, stop)
            if leaving.is_set():
                raise BrokerUnavailable("the channel or the consumer is lost, or a message was not settled")
            await queue.cancel(tag, timeout=CLOSE_SECONDS)
        finally:
            self._consuming = False
            # On a lost channel, messages cannot be settled, so there is no need to wait.
            share = 0.0 if leaving.is_set() else _FINISH_SHARE
            await finish(deliveries, seconds=share * self._settings.shutdown_seconds)

    async def _deliver(self, message: AbstractIncomingMessage, leaving: asyncio.Event) -> None:
        """Handle and settle one message, and count the outcome."""
        read = incoming.read(message.body)
        parent = tracing.accept(message.headers.get("traceparent")) or read.traceparent
        with (
            self._seconds.time(),
            tracing.span(self._span, "consumer", lambda: self._describe(message), parent=parent) as span,
        ):
            traceparent = tracing.onward(parent)
            about = logs.about(read.uuid, traceparent, calculation_id=read.calculation_id)
            if message.user_id:
                about["user_id"] = safe_id(message.user_id)
            with bound_contextvars(queue=self._queue.name, message_id=safe_id(message.message_id), **about):
                try:
                    outcome = await self._handle(message, read, traceparent)
                except Exception as error:  # noqa: BLE001 - an unexpected error must not lose the message
                    outcome = "returned"
                    log = _log.warning if isinstance(error, _OUTAGES) else _log.error
                    log("message_failed", **logs.describe(error))
                    await wait_at_most(_RETRY_SECONDS, leaving)
                await settle(message, outcome, leaving)
            if outcome != "handled":
                span.set_status(StatusCode.ERROR)
            self._outcomes[outcome].inc()

    async def _handle(self, message: AbstractIncomingMessage, read: Incoming, traceparent: str) -> str:
        """Record one message, or dead-letter it. Returns the outcome by its name in the metrics."""
        try:
            if UNDECODABLE in message.headers:
                raise Malformed(f"a property cannot be decoded: see {UNDECODABLE}")
            await process_with_retries(self._batches.process, self._decode(read, traceparent))
        except self._refusals as refusal:
            await process_with_retries(self._letters.process, dead_letter(message, refusal))
            _log.warning("message_dead_lettered", reason=type(refusal).__name__)
            return "dead_lettered"
        _log.info("message_handled")
        return "handled"

    async def _record_batch(self, batch: Sequence[Content]) -> Failures:
        async with self._transaction() as connection:
            failures = await self._record(connection, batch)
        self._committed()
        return failures

    def _describe(self, message: AbstractIncomingMessage) -> Attributes:
        message_id = safe_id(message.message_id)
        return {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": self._destination,
            "messaging.rabbitmq.destination.routing_key": self._queue.routing_key,
        } | ({"messaging.message.id": message_id} if message_id else {})


async def settle(message: AbstractIncomingMessage, outcome: str, leaving: asyncio.Event) -> None:
    """Acknowledge a message or, if its handling failed unexpectedly, return it to its queue.

    Each is acknowledged by itself. A `multiple` ack would include messages that aio-pika could not pass on.
    It is returned by a reject, because RabbitMQ 4.3 does not count a delivery that a nack ends towards the
    delivery limit. If settling fails, leave the channel: otherwise the message would count as prefetched.
    """
    try:
        if outcome == "returned":
            await message.reject(requeue=True)
        else:
            await message.ack()
    except Exception as error:  # noqa: BLE001 - see above
        leaving.set()
        _log.error("message_not_settled", **logs.describe(error))


async def finish(deliveries: Collection[asyncio.Task[None]], *, seconds: float) -> None:
    """Wait at most *seconds* for the deliveries. Messages not settled by then return to the queue."""
    if deliveries:
        await asyncio.wait(deliveries, timeout=seconds)
    for delivery in deliveries:
        delivery.cancel()
    await asyncio.gather(*deliveries, return_exceptions=True)
