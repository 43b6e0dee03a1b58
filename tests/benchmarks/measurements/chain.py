"""The whole chain: request stored, e-mail accepted, calculation published, calculation recorded."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika
import msgspec
from aio_pika.abc import AbstractIncomingMessage

from deploy.local.errors import LocalStackError
from service.outbox.events import CalculationCreated, RequestCalculated, RequestEmailSent
from tests.benchmarks import subjects
from tests.benchmarks.comparison import PER_SECOND, Comparison, Figures
from tests.benchmarks.http_load import CONNECTIONS
from tests.benchmarks.rate import Waits, call_steadily
from tests.benchmarks.smtp_sink import SmtpSink
from tests.benchmarks.stand import Stand, compare
from tests.harness import queues
from worker.rabbitmq import topology

_LENGTHS = 12  # of a usual measurement: a minute, for the rate
_MOST_ON_THE_WAY = 500  # requests: more would be a backlog
_PREFETCH = 256
_WARM_SECONDS = 3.0
_SPARE_SECONDS = 60.0

_LENGTH = re.compile(rb"^content-length: (\d+)", re.MULTILINE | re.IGNORECASE)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def measure(stand: Stand) -> list[Comparison]:
    """Find the rate that one API and one worker process sustain, then time requests at half of it."""
    url = await stand.database("chain")
    seconds = _LENGTHS * stand.sizes.seconds

    async def ours() -> Figures:
        async with (
            asyncio.timeout(2 * seconds + _SPARE_SECONDS),
            SmtpSink() as sink,
            stand.worker(url, smtp_url=sink.url, EMAIL_CONCURRENCY="32"),
            stand.api(url) as api,
        ):
            caller = _Caller(stand.token, api.port)
            async with _calculating(stand, caller):
                rate = await caller.saturate(seconds)
                caller.waits.forget()
                await call_steadily(caller.call_in_turn, rate=rate / 2, seconds=seconds / 2)
                await caller.complete()
        return {PER_SECOND: rate, **caller.waits.figures()}

    return [await compare("chain", {"ours": ours}, (), stand)]


class _Caller:
    """Sends requests over a few connections, and knows which have no calculation yet.

    wrk would not note the time of each.
    """

    def __init__(self, token: str, port: int) -> None:
        self.waits = Waits()
        self._port = port
        self._on_the_way = asyncio.Semaphore(_MOST_ON_THE_WAY)
        self._free: asyncio.Queue[Connection | None] = asyncio.Queue()
        for _ in range(CONNECTIONS):
            self._free.put_nowait(None)
        self._request = (
            "POST /v1/request HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {token}\r\nContent-Length: {len(subjects.JSON_BODY)}\r\n\r\n"
        ).encode() + subjects.JSON_BODY

    def note_visible(self, uuid: str) -> None:
        """Note that the calculation of a request is visible. Repeats count nothing."""
        if uuid not in self.waits.ended:
            self.waits.end(uuid)
            self._on_the_way.release()

    async def complete(self) -> None:
        """Wait until every request is through. Raises LocalStackError."""
        if not await self.waits.complete():
            raise LocalStackError("Not every request got its calculation.")

    async def saturate(self, seconds: float) -> float:
        """Send a request whenever another is through; return how many a second are, after a warm-up."""
        async with asyncio.TaskGroup() as group:
            await self._keep_full(group, _WARM_SECONDS)
            began, before = time.monotonic(), len(self.waits.ended)
            await self._keep_full(group, seconds)
            rate = (len(self.waits.ended) - before) / (time.monotonic() - began)
        await self.complete()
        return rate

    async def _keep_full(self, group: asyncio.TaskGroup, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await self._on_the_way.acquire()
            group.create_task(self._post(time.monotonic()))

    async def call_in_turn(self, due: float) -> None:
        """Send a request, once there is room for it."""
        await self._on_the_way.acquire()
        await self._post(due)

    async def _post(self, due: float) -> None:
        """Send a request. Its time counts from when it was *due*, so the wait for a connection counts too."""
        connection = await self._free.get()
        if connection is None or connection[0].at_eof():  # The API closes a connection that has been idle.
            connection = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = connection
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not head.startswith(b"HTTP/1.1 200 ") or length is None:
            raise LocalStackError(f"The API answered {head.decode()}")
        answer = msgspec.json.decode(await reader.readexactly(int(length[1])))
        self._free.put_nowait(connection)
        self.waits.began[answer["data"]["uuid"]] = due


@asynccontextmanager
async def _calculating(stand: Stand, caller: _Caller) -> AsyncIterator[None]:
    """Publish a calculation for each e-mail sent. A request.calculated shows that the id is visible."""
    async with queues.open_channel(stand.amqp_url) as channel:
        for queue in topology.QUEUES:
            await (await channel.get_queue(queue.name, ensure=False)).purge()
        exchange = await channel.get_exchange(topology.CALCULATIONS, ensure=False)

        async def handle(message: AbstractIncomingMessage) -> None:
            uuid = (message.message_id or "").partition(".")[0]
            if message.type == RequestCalculated.type:
                caller.note_visible(uuid)
            else:
                body = msgspec.json.encode(CalculationCreated(uuid, f"calculation-{uuid}"))
                await exchange.publish(aio_pika.Message(body, delivery_mode=2), CalculationCreated.type)
            await message.ack()

        await channel.set_qos(prefetch_count=_PREFETCH)
        events = await channel.declare_queue("chain", durable=True, arguments={"x-queue-type": "quorum"})
        for event in (RequestEmailSent, RequestCalculated):
            await events.bind(topology.REQUESTS, event.type)
        tag = await events.consume(handle)
        yield
        await events.cancel(tag)
        await events.delete(if_unused=False, if_empty=False)
