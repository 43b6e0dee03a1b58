"""What a calculation and an e-mail cost, compared with a create."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
from aio_pika import Message

from service.outbox.events import CalculationCreated
from service.postgres.pool import Connection
from tests.benchmarks import costs
from tests.benchmarks.stand import COLUMNS, Bar, Figures, Stand
from tests.harness import databases, queues, stored
from tests.harness.mail_server import ScriptedMailServer
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS, Queue
from worker.relay import pointers

_CALCULATIONS_A_SECOND = 8_000  # put into the queue for each second of a measurement
_EMAILS_A_SECOND = 1_500  # likewise
_LIMITS = {"calculation": 0.8, "e-mail": 4.7}


async def measure(stand: Stand) -> list[bool]:
    async with stand.api(await stand.database("ours")) as api, ScriptedMailServer() as mail:

        async def recorded(connection: Connection) -> int:
            return int(await connection.fetchval("SELECT count(*) FROM outbox"))

        async def accepted(_: Connection) -> int:
            return len(mail.contents)

        async def send_emails() -> Figures:
            mail.contents.clear()
            settings = {"SMTP_URL": mail.url, "EMAIL_CONCURRENCY": "32"}
            return await _consume(stand, NOTIFICATIONS, _EMAILS_A_SECOND, accepted, settings)

        async def record_calculations() -> Figures:
            return await _consume(stand, CALCULATION_RESULTS, _CALCULATIONS_A_SECOND, recorded, {})

        async def create(*, seconds: int | None = None) -> Figures:
            return await costs.load(stand, api, [costs.REQUESTS], seconds=seconds)

        await create(seconds=1)
        sides = {"calculation": record_calculations, "e-mail": send_emails, "create": create}
        bars = [Bar(side=side, of="create", kind="at most", limit=limit) for side, limit in _LIMITS.items()]
        return [await stand.compare("consumers", sides, bars)]


async def _consume(
    stand: Stand,
    queue: Queue,
    a_second: int,
    count: Callable[[Connection], Awaitable[int]],
    settings: dict[str, str],
) -> Figures:
    """Store requests, and no others, fill the queue with a message for each, and let a worker read it."""
    url, number = await stand.database("consumers"), a_second * stand.seconds
    async with databases.connected(url) as connection:
        await connection.execute("TRUNCATE calculation_request, event, outbox, email")
        requests = [stored.new_request(**COLUMNS) for _ in range(number)]
        async with connection.transaction():
            for request in requests:
                await stored.insert(connection, request)
            await connection.execute(pointers.SETTINGS)
            events = [event.payload for event in await pointers.lock(connection, pending=number, held=0)]
        await connection.execute("TRUNCATE outbox")
        results = [CalculationCreated(each.uuid, f"calculation-{each.uuid}") for each in requests]
        of_results = queue is CALCULATION_RESULTS
        await _fill(stand, queue, [msgspec.json.encode(each) for each in results] if of_results else events)
        role = "calculations" if of_results else "notifications"
        async with stand.worker(url, role, settings=settings) as worker:
            done = partial(count, connection)
            return await stand.rate_of(worker, done, number, seconds=4 * stand.seconds)


async def _fill(stand: Stand, queue: Queue, bodies: Sequence[bytes]) -> None:
    async with queues.open_channel(stand.amqp_url) as channel:
        await (await channel.get_queue(queue.name, ensure=False)).purge()
        exchange = await channel.get_exchange(queue.exchange, ensure=False)
        messages = [Message(each, delivery_mode=2, message_id=str(n)) for n, each in enumerate(bodies)]
        for start in range(0, len(messages), 500):
            window = messages[start : start + 500]
            await asyncio.gather(*(exchange.publish(each, queue.routing_key) for each in window))
