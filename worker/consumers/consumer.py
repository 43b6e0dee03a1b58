"""How a queue is read, settled and dead-lettered: once for every consumer."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

import structlog
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from structlog.contextvars import bound_contextvars

from service.outbox.events import trace_of
from service.postgres.outages import PostgresUnavailable
from service.postgres.schema import SchemaOutdated
from service.server.probes import NotReady
from service.telemetry import logs, trace_context, tracing
from service.telemetry.spans import Attributes
from worker import metrics
from worker.rabbitmq import connection as broker
from worker.rabbitmq import topology
from worker.rabbitmq.alarm import is_blocked
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, TopologyDiffers
from worker.rabbitmq.copies import copy_of
from worker.rabbitmq.topology import Queue
from worker.settings import WorkerSettings
from worker.waiting import Pauses, first_of, rest

Content = TypeVar("Content")

_FAULT_SECONDS = 1.0  # between the attempts at a message that makes a handler fail
_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

_log = structlog.get_logger()


_OUTAGES: tuple[type[Exception], ...] = (
    BrokerUnavailable,
    PostgresUnavailable,
    SchemaOutdated,
    *BROKER_ERRORS,
)


class Malformed(Exception):
    """The message is not what this queue carries."""


class Consumer(Generic[Content]):
    """Reads one queue: decodes each message, has it handled, and settles it by hand.

    *refusals* are the exceptions of a handler that no repetition can mend: the message goes to the dead
    letters with the reason in its headers. While Postgres is away the messages in hand wait for it, and
    *dependency*, which raises PostgresUnavailable then, keeps the queue from being opened.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        queue: Queue,
        *,
        decode: Callable[[bytes], Content],
        handle: Callable[[Content], Awaitable[None]],
        refusals: tuple[type[Exception], ...],
        dependency: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._destination = f"{queue.exchange}:{queue.routing_key}:{queue.name}"
        self._decode = decode
        self._handle = handle
        self._refusals: tuple[type[Exception], ...] = (Malformed, *refusals)
        self._dependency = dependency
        # The queue before the pool has an end and a deadline, which would look like an outage of Postgres.
        self._room = asyncio.Semaphore(settings.database_pool_size)
        self._deliveries: set[asyncio.Task[None]] = set()
        self._leaving = asyncio.Event()  # nothing more may be handled on the present channel
        self._consuming = False
        self._obstacle = ""
        for outcome in ("handled", "dead_lettered", "returned"):
            metrics.consumer_messages.labels(queue.name, outcome)
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
                async with (
                    broker.open_role(self._settings, name=name, needs=needs) as channel,
                    broker.open_channel(self._settings, name=self._queue.dead_letters) as burials,
                ):
                    await self._consume(channel, burials, pauses, stop)
            except _OUTAGES as error:
                self._obstacle = str(error) if isinstance(error, TopologyDiffers) else ""
                await pauses.after(error, stop)

    async def _consume(
        self, channel: AbstractChannel, burials: AbstractChannel, pauses: Pauses, stop: asyncio.Event
    ) -> None:
        """Consume on one channel until *stop*, or until a channel or the consumer is gone.

        Dead letters go over another connection: during an alarm RabbitMQ reads nothing more from one that
        publishes, acknowledgements included.
        """
        self._leaving = leaving = asyncio.Event()
        for each in (channel, burials):
            each.close_callbacks.add(lambda *_: leaving.set())
        underlay = await channel.get_underlay_channel()
        underlay.on_consumer_cancel_callbacks.add(lambda _: leaving.set())
        async with asyncio.timeout(self._settings.broker_timeout_seconds):
            await channel.set_qos(prefetch_count=self._settings.consumer_prefetch)
            queue = await channel.get_queue(self._queue.name, ensure=False)
            tag = await queue.consume(partial(self._receive, burials))
        self._consuming = True
        pauses.reset()
        _log.info("consumer_started", queue=self._queue.name)
        try:
            await first_of(leaving, stop)
            if leaving.is_set():
                raise BrokerUnavailable("a channel, the consumer or Postgres is gone")
            await queue.cancel(tag, timeout=broker.CLOSE_SECONDS)
        finally:
            self._consuming = False
            await self._finish_deliveries(leaving)

    async def _finish_deliveries(self, leaving: asyncio.Event) -> None:
        """Let the deliveries in hand end, with a bound; those not settled then go back to the queue."""
        if self._deliveries:
            await asyncio.wait(self._deliveries, timeout=self._settings.finish_seconds)
        leaving.set()
        for delivery in self._deliveries:
            delivery.cancel()
        await asyncio.gather(*self._deliveries, return_exceptions=True)

    async def _receive(self, burials: AbstractChannel, message: AbstractIncomingMessage) -> None:
        """Start a delivery. In a task of ours: the channel would cancel its own in the middle of the work."""
        delivery = asyncio.create_task(self._deliver(burials, message))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    async def _deliver(self, burials: AbstractChannel, message: AbstractIncomingMessage) -> None:
        """Handle one message and settle it. A lost channel leaves it unsettled: it will come again."""
        outcome = "returned"
        with (
            bound_contextvars(queue=self._queue.name, message_id=safe_id(message.message_id)),
            metrics.consumer_seconds.labels(self._queue.name).time(),
            tracing.span(
                f"process {self._destination}",
                "consumer",
                lambda: self._describe(message),
                parent=_trace_of(message) if tracing.is_on() else None,
            ) as span,
        ):
            try:
                outcome = await self._handle_and_settle(burials, message)
            except (BrokerUnavailable, PostgresUnavailable):
                _log.info("message_left_to_the_queue")  # We are leaving; closing the channel returns it.
            except BROKER_ERRORS as error:
                self._leaving.set()
                _log.warning("message_not_settled", error=logs.summarize(error))
            except Exception as error:  # noqa: BLE001 - unsettled for ever, it would take up a place
                self._leaving.set()
                _log.error("message_not_settled", **logs.describe(error))
            finally:
                span.describe(f"process {self._destination}", {}, failed=outcome != "handled")
                metrics.consumer_messages.labels(self._queue.name, outcome).inc()

    def _describe(self, message: AbstractIncomingMessage) -> Attributes:
        message_id = safe_id(message.message_id)
        return {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": self._destination,
            "messaging.rabbitmq.destination.routing_key": self._queue.routing_key,
        } | ({"messaging.message.id": message_id} if message_id else {})

    async def _handle_and_settle(self, burials: AbstractChannel, message: AbstractIncomingMessage) -> str:
        """Return what became of the message: handled, dead_lettered or returned."""
        try:
            content = self._decode(message.body)
            async with self._room:
                await self._handle_through_outages(content)
        except self._refusals as refusal:
            await self._bury(burials, message, refusal)
            return "dead_lettered"
        except (BrokerUnavailable, PostgresUnavailable, *BROKER_ERRORS):
            raise
        except Exception as error:  # noqa: BLE001 - a fault of ours must not lose the message
            _log.error("message_failed", **logs.describe(error))
            await rest(_FAULT_SECONDS, self._leaving)
            await message.reject(requeue=True)  # The delivery limit ends this; it does not count every nack.
            return "returned"
        await message.ack()
        _log.info("message_handled")
        return "handled"

    async def _handle_through_outages(self, content: Content) -> None:
        """Handle, and again while Postgres is away: giving the message back would count against it."""
        pauses = Pauses("message_waits_for_postgres", longest_seconds=1.0)
        if self._leaving.is_set():
            raise BrokerUnavailable
        while True:
            try:
                return await self._handle(content)
            except PostgresUnavailable as error:
                if self._leaving.is_set():
                    raise
                await pauses.after(error, self._leaving)

    async def _bury(
        self, burials: AbstractChannel, message: AbstractIncomingMessage, refusal: Exception
    ) -> None:
        """Move a message to the dead letters: a confirmed copy with the reason first, then the settling."""
        reason = type(refusal).__name__
        headers = {**message.headers, "x-reason": reason, "x-reason-text": refusal.__doc__ or ""}
        copy = copy_of(message, headers)
        if len(copy.headers) < len(headers):
            _log.warning("headers_not_copied", number=len(headers) - len(copy.headers))
        await confirm_copy(burials, copy, self._queue, seconds=self._settings.broker_timeout_seconds)
        await message.ack()
        _log.warning("message_dead_lettered", reason=reason)


async def confirm_copy(channel: AbstractChannel, copy: Message, queue: Queue, *, seconds: float) -> None:
    """Publish to the dead letters of *queue*, and have it confirmed within *seconds* after the last alarm.

    To drop the channel during an alarm would leave one more copy there for each attempt. Raises TimeoutError.
    """
    exchange = await channel.get_exchange(topology.DEAD_LETTERS, ensure=False)
    publishing = asyncio.create_task(exchange.publish(copy, queue.dead_letters, mandatory=True))
    was_blocked = False
    try:
        while not (await asyncio.wait([publishing], timeout=seconds))[0]:
            blocked = await is_blocked(channel)
            if channel.is_closed or not (blocked or was_blocked):
                raise TimeoutError
            was_blocked = blocked
        await publishing
    finally:
        publishing.cancel()  # The channel goes with it.


def safe_id(message_id: str | None) -> str | None:
    """Return the id of a message of another team when it is fit for a log line."""
    return message_id if message_id and _SAFE_ID.fullmatch(message_id) else None


def _trace_of(message: AbstractIncomingMessage) -> str | None:
    """Return the trace that a message belongs to, as its headers say or, as a CloudEvent, its body."""
    return trace_context.traceparent({"traceparent": str(message.headers.get("traceparent"))}) or trace_of(
        message.body
    )
