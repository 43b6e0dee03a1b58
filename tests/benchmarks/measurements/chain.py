"""The whole chain: request stored, e-mail accepted, calculation published, calculation recorded."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
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

DUE, ANSWERED, EMAILED, PUBLISHED, VISIBLE = "due", "answered", "e-mailed", "published", "visible"

_STEPS: Mapping[str, tuple[str, str]] = {
    "POST": (DUE, ANSWERED),
    "e-mail": (ANSWERED, EMAILED),
    "calculation": (EMAILED, PUBLISHED),
    "calculation_id": (PUBLISHED, VISIBLE),
    "chain": (DUE, VISIBLE),
}
_QUANTILES = {P50: 0.5, P99: 0.99}
_MOST_ON_THE_WAY = 500  # requests: more would be a backlog
_PREFETCH = 256
_WARM_SECONDS = 3.0
_STRAGGLER_SECONDS = 30.0

_MESSAGE_ID = re.compile(rb"^Message-ID:\s+<([^.]+)\.", re.MULTILINE)
_LENGTH = re.compile(rb"^content-length: (\d+)", re.MULTILINE | re.IGNORECASE)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def measure(stand: Stand) -> list[Comparison]:
    """Find the rate that one API and one worker process sustain, then time each step at half of it."""
    url = await stand.database("chain")

    async def ours() -> Figures:
        chain = Chain()
        async with (
            SmtpSink(chain.note_email) as sink,
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
    """When each request reached each step, by its uuid."""

    def __init__(self) -> None:
        self.on_the_way = asyncio.Semaphore(_MOST_ON_THE_WAY)
        self.times: dict[str, dict[str, float]] = {}
        self.forget()

    def forget(self) -> None:
        """Forget all requests."""
        self.times = {step: {} for step in (DUE, ANSWERED, EMAILED, PUBLISHED, VISIBLE)}

    def note(self, step: str, uuid: str) -> None:
        """Note that a request has reached *step*. Repeats count nothing."""
        if uuid in self.times[step]:
            return
        self.times[step][uuid] = time.monotonic()
        if step == VISIBLE:
            self.on_the_way.release()

    def note_email(self, content: bytes) -> None:
        """Note an e-mail that the sink has accepted."""
        found = _MESSAGE_ID.search(content)
        assert found is not None
        self.note(EMAILED, found[1].decode())

    async def complete(self) -> None:
        """Wait until every request is through. Raises LocalStackError."""

        def missing() -> int:
            return len(self.times[ANSWERED]) - len(self.times[VISIBLE])

        if not await until(lambda: missing() == 0, seconds=_STRAGGLER_SECONDS):
            raise LocalStackError(f"{missing()} requests did not get their calculation.")

    def figures(self) -> Figures:
        """Return quantiles of each step in milliseconds."""
        figures = {}
        for name, (first, last) in _STEPS.items():
            begun, ended = self.times[first], self.times[last]
            waits = sorted(max(0.0, ended[uuid] - begun[uuid]) * 1000 for uuid in begun)
            for quantile, share in _QUANTILES.items():
                figures[f"{name} {quantile}"] = waits[int(share * (len(waits) - 1))]
        return figures


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
                chain.note(VISIBLE, uuid)
            else:
                chain.note(PUBLISHED, uuid)
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
        through = self._chain.times[VISIBLE]
        async with asyncio.timeout(seconds + _STRAGGLER_SECONDS), asyncio.TaskGroup() as group:
            await self._keep_full(group, _WARM_SECONDS)
            began, before = time.monotonic(), len(through)
            await self._keep_full(group, seconds)
            rate = (len(through) - before) / (time.monotonic() - began)
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
        uuid = answer["data"]["uuid"]
        self._chain.times[DUE][uuid] = due
        self._chain.note(ANSWERED, uuid)
