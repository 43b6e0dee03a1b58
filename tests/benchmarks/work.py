"""What a calculation and an e-mail cost, compared with a create; the start and memory of the processes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from aio_pika import Message

from deploy.local.errors import LocalStackError
from service.outbox.events import CalculationCreated
from service.postgres.pool import Connection
from tests.benchmarks import subjects
from tests.benchmarks.http_calls import create_on
from tests.benchmarks.stand import Bar, Figures, Stand
from tests.harness import databases, queues
from tests.harness.mail_server import ScriptedMailServer
from tests.harness.processes import Process
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS, Queue
from worker.relay import pointers

_CALCULATIONS_A_SECOND = 8_000  # put into the queue for each second of a measurement
_EMAILS_A_SECOND = 1_500  # likewise
_PATIENCE = 4  # times as long is the wait until all are done: a worker reads a queue faster than it sends
_SESSIONS = "32"  # with the mail server
_STARTED, _MEGABYTES = "s until ready", "MB after load"


async def measure_consumers(stand: Stand) -> list[bool]:
    url = await stand.database("consumers")

    async def record_calculations() -> Figures:
        number = _CALCULATIONS_A_SECOND * stand.seconds
        async with _stored(url, number) as (connection, uuids, _):
            results = [CalculationCreated(uuid, f"calculation-{uuid}") for uuid in uuids]
            await _fill(stand, CALCULATION_RESULTS, [msgspec.json.encode(each) for each in results])

            async def recorded() -> int:
                return int(await connection.fetchval("SELECT count(*) FROM outbox"))

            async with stand.worker(url, "calculations") as worker:
                return await stand.rate_of(worker, recorded, number, seconds=stand.seconds * _PATIENCE)

    async def send_emails() -> Figures:
        number = _EMAILS_A_SECOND * stand.seconds
        async with _stored(url, number) as (_, _, events), ScriptedMailServer() as mail:
            await _fill(stand, NOTIFICATIONS, events)

            async def accepted() -> int:
                return len(mail.contents)

            settings = {"SMTP_URL": mail.url, "EMAIL_CONCURRENCY": _SESSIONS}
            async with stand.worker(url, "notifications", settings=settings) as worker:
                return await stand.rate_of(worker, accepted, number, seconds=stand.seconds * _PATIENCE)

    async with stand.api(await stand.database("ours")) as api:

        async def create() -> Figures:
            return await create_on(stand, api)

        await create_on(stand, api, seconds=1)
        sides = {"calculation": record_calculations, "e-mail": send_emails, "create": create}
        limits = {"calculation": 0.8, "e-mail": 4.7}
        bars = [Bar(side=side, of="create", kind="at most", limit=limit) for side, limit in limits.items()]
        return [await stand.compare("consumers", sides, bars)]


@asynccontextmanager
async def _stored(url: str, number: int) -> AsyncIterator[tuple[Connection, list[str], list[bytes]]]:
    """Store so many requests, and no others; yield a connection, their uuids and their published events."""
    async with databases.connected(url) as connection:
        await connection.execute("TRUNCATE calculation_request, event, outbox, email")
        async with connection.transaction():
            uuids = [await subjects.store(connection) for _ in range(number)]
            await connection.execute(pointers.SETTINGS)
            events = [event.payload for event in await pointers.lock(connection, pending=number, held=0)]
        await connection.execute("TRUNCATE outbox")
        yield connection, uuids, events


async def _fill(stand: Stand, queue: Queue, bodies: Sequence[bytes]) -> None:
    async with queues.open_channel(stand.amqp_url) as channel:
        await (await channel.get_queue(queue.name, ensure=False)).purge()
        exchange = await channel.get_exchange(queue.exchange, ensure=False)
        messages = [Message(each, delivery_mode=2, message_id=str(n)) for n, each in enumerate(bodies)]
        for start in range(0, len(messages), 500):
            window = messages[start : start + 500]
            await asyncio.gather(*(exchange.publish(each, queue.routing_key) for each in window))


async def measure_footprint(stand: Stand) -> list[bool]:
    url = await stand.database("footprint")

    def figures(running: Process) -> Figures:
        return {_STARTED: running.seconds_to_ready, _MEGABYTES: running.rss_megabytes()}

    async def api() -> Figures:
        async with stand.api(url) as running:
            await create_on(stand, running)
            return figures(running)

    async def worker() -> Figures:
        async with ScriptedMailServer() as mail:
            async with stand.worker(url, ready=True, settings={"SMTP_URL": mail.url}) as running:
                await asyncio.sleep(stand.seconds)  # it relays and mails what the API has stored before
                measured = figures(running)
            if not mail.contents:
                raise LocalStackError("The worker sent no e-mail, so its memory shows nothing.")
            return measured

    bars = [Bar(side="API", figure=_MEGABYTES, kind="at most", limit=100.0)]
    bars.append(Bar(side="worker, all roles", figure=_MEGABYTES, kind="at most", limit=80.0))
    return [await stand.compare("footprint", {"API": api, "worker, all roles": worker}, bars)]
