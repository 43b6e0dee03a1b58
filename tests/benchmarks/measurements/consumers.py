"""Consumers: calculations recorded and e-mails accepted a second, beside creates."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import aio_pika
import msgspec

from deploy.local.errors import LocalStackError
from service.outbox.events import CalculationCreated
from service.postgres.pool import Connection
from tests.benchmarks import subjects
from tests.benchmarks.comparison import PER_SECOND, Bar, Comparison, Figures
from tests.benchmarks.measurements.create import OURS, create_on
from tests.benchmarks.smtp_sink import SmtpSink
from tests.benchmarks.stand import Stand
from tests.harness import queues
from tests.harness.waiting import until
from worker.rabbitmq import topology
from worker.rabbitmq.topology import Queue

CREATE = "create"

_MESSAGES_A_SECOND = 8_000  # put into the queue for each second of a measurement
_EMAILS_A_SECOND = 1_500  # likewise
_PATIENCE = 4  # times as long is the wait until all are done: a worker reads a queue faster than it sends
_START_SECONDS = 30.0
_PAUSE_SECONDS = 0.02
_SESSIONS = 32  # with the mail server

_CALCULATIONS_BARS = (Bar(side=OURS, of=CREATE, limit=1.0),)
_EMAILS_BARS = (Bar(side=OURS, of=CREATE, limit=0.5),)

Done = Callable[[], Awaitable[int]]


async def measure(stand: Stand) -> list[Comparison]:
    """Fill a queue, start a worker, and count what it does."""
    url = await stand.database("consumers")
    async with stand.api(await stand.database("ours")) as api:
        await create_on(stand, api, seconds=1)
        create = partial(create_on, stand, api)
        return [
            await stand.compare(name, {OURS: partial(ours, stand, url), CREATE: create}, bars)
            for name, ours, bars in (
                ("calculations recorded", _calculations, _CALCULATIONS_BARS),
                ("e-mails accepted", _emails, _EMAILS_BARS),
            )
        ]


async def _calculations(stand: Stand, url: str) -> Figures:
    async with stand.connected(url) as connection:
        uuids = await _stored(connection, _MESSAGES_A_SECOND * stand.sizes.seconds)
        return await record_calculations(stand, url, connection, uuids)


async def _emails(stand: Stand, url: str) -> Figures:
    async with stand.connected(url) as connection:
        uuids = await _stored(connection, _EMAILS_A_SECOND * stand.sizes.seconds)
        return await send_emails(stand, url, uuids)


async def record_calculations(
    stand: Stand, url: str, connection: Connection, uuids: Sequence[str]
) -> Figures:
    """Return the rate at which a worker records a calculation for each of these requests."""

    async def recorded() -> int:
        count: int = await connection.fetchval("SELECT count(*) FROM outbox")
        return count

    calculations = [CalculationCreated(uuid, f"calculation-{uuid}") for uuid in uuids]
    await _fill(stand, topology.CALCULATION_RESULTS, [msgspec.json.encode(each) for each in calculations])
    worker = stand.worker(url, "calculations", ready=False)
    return await _rate(stand, worker, recorded, len(uuids))


async def send_emails(stand: Stand, url: str, uuids: Sequence[str]) -> Figures:
    """Return the rate at which a worker e-mails the customers of these requests."""
    async with SmtpSink() as sink:
        await _fill(stand, topology.NOTIFICATIONS, [subjects.event(uuid) for uuid in uuids])
        worker = stand.worker(
            url, "notifications", smtp_url=sink.url, ready=False, EMAIL_CONCURRENCY=str(_SESSIONS)
        )
        return await _rate(stand, worker, sink.count, len(uuids))


async def _stored(connection: Connection, count: int) -> list[str]:
    """Empty the tables and store requests, without their events."""
    await connection.execute("TRUNCATE calculation_request, outbox, outbox_held, email")
    async with connection.transaction():
        uuids = [await subjects.store(connection) for _ in range(count)]
    await connection.execute("TRUNCATE outbox")
    return uuids


async def _fill(stand: Stand, queue: Queue, bodies: Sequence[bytes]) -> None:
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


async def _rate(
    stand: Stand, worker: AbstractAsyncContextManager[object], done: Done, messages: int
) -> Figures:
    """Return how many a second are done, from the first one until all are, or the time is up."""

    async def has_begun() -> bool:
        return await done() > 0

    async def is_done() -> bool:
        return await done() >= messages

    async with worker:
        if not await until(has_begun, seconds=_START_SECONDS, pause_seconds=_PAUSE_SECONDS):
            raise LocalStackError("The worker does nothing.")
        first, began = await done(), time.monotonic()
        await until(is_done, seconds=stand.sizes.seconds * _PATIENCE, pause_seconds=_PAUSE_SECONDS)
        count, elapsed = await done(), time.monotonic() - began
    return {PER_SECOND: (count - first) / elapsed}
