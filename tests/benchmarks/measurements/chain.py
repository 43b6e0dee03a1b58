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
from tests.benchmarks.http_load import CONNECTIONS, P50, P99
from tests.benchmarks.measurements.create import OURS
from tests.benchmarks.smtp_sink import SmtpSink
from tests.benchmarks.stand import Stand
from tests.harness import queues
from tests.harness.processes import Process
from tests.harness.waiting import until
from worker.rabbitmq import topology

_MOST_ON_THE_WAY = 500  # requests: more would be a backlog
_PREFETCH = 256
_WARM_SECONDS = 3.0
_STRAGGLER_SECONDS = 30.0

_LENGTH = re.compile(rb"^content-length: (\d+)", re.MULTILINE | re.IGNORECASE)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def measure(stand: Stand) -> list[Comparison]:
    """Find the rate that one API and one worker process sustain, then time requests at half of it."""
    url = await stand.database("chain")

    async def ours() -> Figures:
        chain = Chain()
        async with (
            SmtpSink() as sink,
            stand.worker(url, smtp_url=sink.url, EMAIL_CONCURRENCY="32"),
            _calculating(stand, chain),
            stand.api(url) as api,
        ):
            caller = _Caller(stand.token, api, chain)
            rate = await caller.saturate(stand.sizes.chain_seconds)
            chain.forget()
            await caller.keep_to(rate / 2, stand.sizes.chain_seconds / 2)
        return {PER_SECOND: rate, **chain.figures()}

    return [await stand.compare("chain", {OURS: ours})]


class Chain:
    """When each request was due, and when its calculation was visible, by its uuid."""

    def __init__(self) -> None:
        self.on_the_way = asyncio.Semaphore(_MOST_ON_THE_WAY)
        self.forget()

    def forget(self) -> None:
        """Forget all requests."""
        self.due: dict[str, float] = {}
        self.visible: dict[str, float] = {}

    def note_visible(self, uuid: str) -> None:
        """Note that the calculation of a request is visible. Repeats count nothing."""
        if uuid not in self.visible:
            self.visible[uuid] = time.monotonic()
            self.on_the_way.release()

    async def complete(self) -> None:
        """Wait until every request is through. Raises LocalStackError."""
        if not await until(lambda: self.due.keys() <= self.visible.keys(), seconds=_STRAGGLER_SECONDS):
            missing = len(self.due.keys() - self.visible.keys())
            raise LocalStackError(f"{missing} requests did not get their calculation.")

    def figures(self) -> Figures:
        """Return quantiles in milliseconds."""
        waits = sorted((self.visible[uuid] - due) * 1000 for uuid, due in self.due.items())
        return {name: waits[int(share * (len(waits) - 1))] for name, share in ((P50, 0.5), (P99, 0.99))}


@asynccontextmanager
async def _calculating(stand: Stand, chain: Chain) -> AsyncIterator[None]:
    """Publish a calculation for each e-mail sent. A request.calculated shows that the id is visible."""
    async with queues.open_channel(stand.amqp_url) as channel:
        for queue in topology.QUEUES:
            await (await channel.get_queue(queue.name, ensure=False)).purge()
        exchange = await channel.get_exchange(topology.CALCULATIONS, ensure=False)

        async def handle(message: AbstractIncomingMessage) -> None:
            uuid = (message.message_id or "").partition(".")[0]
            if message.type == RequestCalculated.type:
                chain.note_visible(uuid)
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


class _Caller:
    """Sends requests over a few connections. wrk would not note the time of each."""

    def __init__(self, token: str, api: Process, chain: Chain) -> None:
        self._free: asyncio.Queue[Connection | None] = asyncio.Queue()
        for _ in range(CONNECTIONS):
            self._free.put_nowait(None)
        self._port = api.port
        self._chain = chain
        self._request = (
            "POST /v1/request HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {token}\r\nContent-Length: {len(subjects.JSON_BODY)}\r\n\r\n"
        ).encode() + subjects.JSON_BODY

    async def saturate(self, seconds: float) -> float:
        """Send a request whenever another is through; return how many a second are, after a warm-up."""
        async with asyncio.timeout(seconds + _STRAGGLER_SECONDS), asyncio.TaskGroup() as group:
            await self._keep_full(group, _WARM_SECONDS)
            began, before = time.monotonic(), len(self._chain.visible)
            await self._keep_full(group, seconds)
            rate = (len(self._chain.visible) - before) / (time.monotonic() - began)
        await self._chain.complete()
        return rate

    async def _keep_full(self, group: asyncio.TaskGroup, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await self._chain.on_the_way.acquire()
            group.create_task(self._post(time.monotonic()))

    async def keep_to(self, rate: float, seconds: float) -> None:
        """Send *rate* requests a second, each at its time."""
        began = time.monotonic()
        async with asyncio.timeout(seconds + _STRAGGLER_SECONDS), asyncio.TaskGroup() as group:
            for number in range(round(rate * seconds)):
                due = began + number / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._chain.on_the_way.acquire()
                group.create_task(self._post(due))
        await self._chain.complete()

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
        self._chain.due[answer["data"]["uuid"]] = due
