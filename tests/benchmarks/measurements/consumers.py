"""Consumers: calculations recorded and e-mails accepted a second, beside creates and what limits them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import aio_pika
import msgspec
from aio_pika.abc import AbstractIncomingMessage
from yarl import URL

from deploy.local.errors import LocalStackError
from service.identifiers import new_request_id, uuid_of
from service.outbox.events import CalculationCreated
from service.postgres.pool import Connection
from tests.benchmarks import subjects
from tests.benchmarks.comparison import PER_SECOND, Bar, Comparison, Figures, Measure, compare
from tests.benchmarks.measurements.create import OURS, create_on, warm
from tests.benchmarks.smtp_sink import SmtpSink
from tests.benchmarks.stand import Stand
from tests.harness import queues
from tests.harness.waiting import until
from worker.rabbitmq import topology
from worker.rabbitmq.topology import Queue
from worker.settings import WorkerSettings

CREATE, AMQP, SMTP = "create", "limit: acknowledging", "limit: mail server"

_MESSAGES_A_SECOND = 8_000  # put into the queue for each second of a measurement
_EMAILS_A_SECOND = 1_500  # likewise
_PATIENCE = 4  # times as long is the wait until all are done: a worker reads a queue faster than it sends
_START_SECONDS = 30.0
_PAUSE_SECONDS = 0.02
SESSIONS = 32  # with the mail server
_PREFETCH = next(
    each.default for each in msgspec.structs.fields(WorkerSettings) if each.name == "consumer_prefetch"
)
_CONTENT = b"\r\n".join([b"x" * 70] * 30) + b"\r\n.\r\n"  # about as long as the product's

_BARS = {
    "calculations recorded": (Bar(side=OURS, of=CREATE, limit=1.0),),
    "e-mails accepted": (Bar(side=OURS, of=CREATE, limit=0.5),),
}

Done = Callable[[], Awaitable[int]]


async def measure(stand: Stand) -> list[Comparison]:
    """Fill a queue, start a worker, and count what it does."""
    url = await stand.database("consumers")
    async with stand.api(await stand.database("ours")) as api:
        await warm(stand, api)
        create = partial(create_on, stand, api)
        sides: dict[str, dict[str, Measure]] = {
            "calculations recorded": {
                OURS: partial(_calculations, stand, url),
                CREATE: create,
                AMQP: partial(_acknowledgements, stand),
            },
            "e-mails accepted": {
                OURS: partial(_emails, stand, url),
                CREATE: create,
                SMTP: partial(_contents, stand),
            },
        }
        return [
            await compare(name, each, _BARS[name], rounds=stand.sizes.rounds, settle=stand.settle)
            for name, each in sides.items()
        ]


async def _calculations(stand: Stand, url: str) -> Figures:
    async with stand.connected(url) as connection:
        uuids = await _stored(connection, _MESSAGES_A_SECOND * stand.sizes.seconds)

        async def recorded() -> int:
            count: int = await connection.fetchval("SELECT count(*) FROM outbox")
            return count

        await fill(stand, topology.CALCULATION_RESULTS, [calculation(uuid) for uuid in uuids])
        worker = stand.worker(url, "calculations", ready=False)
        return await rate(stand, worker, recorded, len(uuids))


async def _acknowledgements(stand: Stand) -> Figures:
    """Acknowledge each message and do nothing else, with aio-pika and the worker's prefetch."""
    bodies = [calculation(uuid_of(new_request_id()))] * _MESSAGES_A_SECOND * stand.sizes.seconds
    await fill(stand, topology.CALCULATION_RESULTS, bodies)
    done = 0

    async def acknowledge(message: AbstractIncomingMessage) -> None:
        nonlocal done
        await message.ack()
        done += 1

    async def acknowledged() -> int:
        return done

    @asynccontextmanager
    async def consuming() -> AsyncIterator[None]:
        async with queues.open_channel(stand.amqp_url) as channel:
            await channel.set_qos(prefetch_count=_PREFETCH)
            queue = await channel.get_queue(topology.CALCULATION_RESULTS.name, ensure=False)
            await queue.consume(acknowledge)
            yield

    return await rate(stand, consuming(), acknowledged, len(bodies))


async def _emails(stand: Stand, url: str) -> Figures:
    async with stand.connected(url) as connection, SmtpSink() as sink:
        uuids = await _stored(connection, _EMAILS_A_SECOND * stand.sizes.seconds)
        await fill(stand, topology.NOTIFICATIONS, [subjects.event(uuid) for uuid in uuids])
        worker = stand.worker(
            url, "notifications", smtp_url=sink.url, ready=False, EMAIL_CONCURRENCY=str(SESSIONS)
        )
        return await rate(stand, worker, sink.count, len(uuids))


async def _contents(stand: Stand) -> Figures:
    """Send one content over and over, from the process of the mail server."""
    async with SmtpSink() as sink:

        @asynccontextmanager
        async def sending() -> AsyncIterator[None]:
            sessions = [asyncio.create_task(_send(sink.url)) for _ in range(SESSIONS)]
            yield
            for session in sessions:
                session.cancel()
            await asyncio.gather(*sessions, return_exceptions=True)

        return await rate(stand, sending(), sink.count, None)


async def _send(url: str) -> None:
    """Send until cancelled."""
    address = URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    await reader.readuntil(b"220 sink\r\n")
    while True:
        writer.write(b"MAIL FROM:<a@example.com>\r\nRCPT TO:<b@example.com>\r\nDATA\r\n")
        await reader.readuntil(b"354 go on\r\n")
        writer.write(_CONTENT)
        await reader.readuntil(b"250 accepted\r\n")


def calculation(uuid: str) -> bytes:
    """Return the message of a calculation team."""
    return msgspec.json.encode(CalculationCreated(uuid, f"calculation-{uuid}"))


async def _stored(connection: Connection, count: int) -> list[str]:
    """Empty the tables and store requests, without their events."""
    await connection.execute("TRUNCATE calculation_request, outbox, outbox_held, email")
    async with connection.transaction():
        uuids = [await subjects.store(connection) for _ in range(count)]
    await connection.execute("TRUNCATE outbox")
    return uuids


async def fill(stand: Stand, queue: Queue, bodies: Sequence[bytes]) -> None:
    """Replace what is in the queue by messages with these bodies."""
    async with queues.open_channel(stand.amqp_url) as channel:
        await (await channel.get_queue(queue.name, ensure=False)).purge()
        exchange = await channel.get_exchange(queue.exchange, ensure=False)
        messages = [
            aio_pika.Message(body, delivery_mode=2, message_id=str(number))
            for number, body in enumerate(bodies)
        ]
        for start in range(0, len(messages), 500):
            window = messages[start : start + 500]
            await asyncio.gather(*(exchange.publish(each, queue.routing_key) for each in window))


async def rate(
    stand: Stand, worker: AbstractAsyncContextManager[object], done: Done, messages: int | None
) -> Figures:
    """Return how many a second are done, from the first one until all are, or the time is up."""
    seconds = stand.sizes.seconds if messages is None else stand.sizes.seconds * _PATIENCE

    async def has_begun() -> bool:
        return await done() > 0

    async def is_done() -> bool:
        return messages is not None and await done() >= messages

    async with worker:
        if not await until(has_begun, seconds=_START_SECONDS, pause_seconds=_PAUSE_SECONDS):
            raise LocalStackError("The worker does nothing.")
        first, began = await done(), time.monotonic()
        await until(is_done, seconds=seconds, pause_seconds=_PAUSE_SECONDS)
        count, elapsed = await done(), time.monotonic() - began
    return {PER_SECOND: (count - first) / elapsed}
