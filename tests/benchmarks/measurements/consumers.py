"""Consumers: what it costs to record a calculation and to send an e-mail, compared with a create."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import aio_pika
import msgspec

from service.identifiers import uuid_of
from service.outbox.events import CalculationCreated
from service.postgres.pool import Connection
from tests.benchmarks import subjects
from tests.benchmarks.comparison import Bar, Comparison, Figures
from tests.benchmarks.http_load import create_on
from tests.benchmarks.rate import rate_of
from tests.benchmarks.stand import Stand, compare
from tests.harness import databases, queues
from tests.harness.mail_server import ScriptedMailServer
from worker.rabbitmq import topology
from worker.rabbitmq.topology import Queue
from worker.relay import pointers

_CALCULATIONS_A_SECOND = 8_000  # put into the queue for each second of a measurement
_EMAILS_A_SECOND = 1_500  # likewise
_PATIENCE = 4  # times as long is the wait until all are done: a worker reads a queue faster than it sends
_SESSIONS = 32  # with the mail server

_LIMITS = [
    Bar(side="calculation", of="create", kind="at most", limit=0.8),
    Bar(side="e-mail", of="create", kind="at most", limit=4.7),
]

Handle = Callable[[Stand, str, Connection, int], Awaitable[Figures]]


async def measure(stand: Stand) -> list[Comparison]:
    url = await stand.database("consumers")

    async def ours(handle: Handle, messages: int) -> Figures:
        async with databases.connected(url) as connection:
            await connection.execute("TRUNCATE calculation_request, event, outbox, email")
            async with connection.transaction():
                for _ in range(messages):
                    await subjects.store(connection)
            return await handle(stand, url, connection, messages)

    async with stand.api(await stand.database("ours")) as api:
        await create_on(stand, api, seconds=1)
        sides = {
            "calculation": partial(ours, _record_calculations, _CALCULATIONS_A_SECOND * stand.seconds),
            "e-mail": partial(ours, _send_emails, _EMAILS_A_SECOND * stand.seconds),
            "create": partial(create_on, stand, api),
        }
        return [await compare("consumers", sides, _LIMITS, stand)]


async def _record_calculations(stand: Stand, url: str, connection: Connection, messages: int) -> Figures:
    """Return the rate at which a worker records a calculation for each of as many stored requests."""

    async def recorded() -> int:
        return int(await connection.fetchval("SELECT count(*) FROM outbox"))

    await connection.execute("TRUNCATE outbox")
    rows = await connection.fetch("SELECT id FROM calculation_request LIMIT $1", messages)
    uuids = [uuid_of(row["id"]) for row in rows]
    calculations = [CalculationCreated(uuid, f"calculation-{uuid}") for uuid in uuids]
    await _fill(stand, topology.CALCULATION_RESULTS, [msgspec.json.encode(each) for each in calculations])
    async with stand.worker(url, "calculations", ready=False) as worker:
        meter = partial(stand.meter, worker)
        return await rate_of(recorded, messages, meter, seconds=stand.seconds * _PATIENCE)


async def _send_emails(stand: Stand, url: str, connection: Connection, messages: int) -> Figures:
    """Return the rate at which a worker e-mails the customers of as many stored requests."""
    locked = await pointers.lock(connection, pending=messages, held=0)
    bodies = [event.payload for event in locked]
    await connection.execute("TRUNCATE outbox")
    async with ScriptedMailServer() as mail_server:

        async def accepted() -> int:
            return len(mail_server.contents)

        await _fill(stand, topology.NOTIFICATIONS, bodies)
        settings = {"smtp_url": mail_server.url, "EMAIL_CONCURRENCY": str(_SESSIONS)}
        async with stand.worker(url, "notifications", ready=False, **settings) as worker:
            meter = partial(stand.meter, worker)
            return await rate_of(accepted, messages, meter, seconds=stand.seconds * _PATIENCE)


async def _fill(stand: Stand, queue: Queue, bodies: Sequence[bytes]) -> None:
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
