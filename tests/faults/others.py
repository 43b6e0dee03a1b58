"""Everybody else: callers with a steady load, the mail server, an auditor, a team of calculations."""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final
from unittest.mock import patch
from weakref import WeakKeyDictionary

import asyncpg
import httpx
import msgspec
from aio_pika import DeliveryMode, ExchangeType, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from service.api import idempotency_key_header
from service.outbox.events import CalculationCreated, CloudEvent, RequestCreated
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from tests.faults.records import Acceptance, Answer, Arrival, Event, Record
from tests.harness import stored
from tests.harness.examples import A_REQUEST
from tests.harness.mail_server import ACCEPTED, ScriptedMailServer, Session
from tests.harness.queues import CONNECT_SECONDS, declare_topology, open_channel
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS
from worker.waiting import wait_at_most

REFUSED_RECIPIENT = b"refused-"  # the mail server refuses addresses with this prefix permanently
AUDITOR: Final = "harness.auditor"
TEAM: Final = "harness.calculation-team"
# request.created goes through an exchange of the harness: one unbinding takes it from every queue at once.
SWITCH: Final = "harness.switch"

_HTTP_SHARE = 0.15  # of the requests without a key; the others do not depend on the APIs
# What a call without an answer raises. AttributeError is anyio's, when the API dies as it accepts.
_CUT_OFF = (httpx.TransportError, AttributeError)
_MESSAGE_ID = re.compile(rb"^Message-ID:\s*<([^>]*)>", re.MULTILINE | re.IGNORECASE)
_ADDRESS = re.compile(rb"<([^>]*)>")
_LINK = re.compile(rb"(https://\S+[?]secret=[\w-]{43})")
_EVERYTHING = ("", "")


@dataclass
class Callers:
    """Creates requests, some at the same time, and records those that are acknowledged."""

    record: Record
    pool: Pool
    apis: Sequence[httpx.AsyncClient]
    chance: random.Random
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    async def run(self, stop: asyncio.Event) -> None:
        """Create requests at the planned rate and a few under keys until *stop*; wait for their outcomes."""
        rate = self.record.plan.rate
        await asyncio.gather(
            self._repeat(self._insert, rate * (1 - _HTTP_SHARE), stop),
            self._repeat(self.post, rate * _HTTP_SHARE, stop),
            self._repeat(self.create_with_key, 3.3, stop),
        )

    async def _repeat(self, create: Callable[[], Awaitable[Any]], rate: float, stop: asyncio.Event) -> None:
        slots = asyncio.Semaphore(32)  # At that number of creates in progress no new one begins.

        async def create_one() -> None:
            async with slots:
                await create()

        async with asyncio.TaskGroup() as under_way:
            while not stop.is_set():
                if not slots.locked():
                    under_way.create_task(create_one())
                await wait_at_most(1 / rate, stop)

    async def _insert(self) -> None:
        """Store a request by the product's own statement."""
        key, body = self._next()
        request = stored.new_request(**body)
        with suppress(PostgresUnavailable, asyncpg.PostgresError):
            async with connections.acquired(self.pool, seconds=2.0) as connection:
                await stored.insert(connection, request)
            self.record.acknowledged[key] = time.monotonic()

    async def post(self, api: httpx.AsyncClient | None = None) -> int | None:
        """Send a create to an API, or to any. Returns the status of the answer, if there is one."""
        key, body = self._next()
        with suppress(*_CUT_OFF):
            response = await (api or self.chance.choice(self.apis)).post("/v1/request", json=body)
            self.record.statuses[response.status_code] += 1
            if response.is_success:
                self.record.acknowledged[key] = time.monotonic()
            return response.status_code
        return None

    async def create_with_key(self) -> None:
        """Send one create two or three times at once and then again, each until an API answers."""
        key, body = self._next()
        sent = await asyncio.gather(*(self._send(key, body) for _ in range(self.chance.randint(2, 3))))
        if any(sent):
            self.record.acknowledged[key] = time.monotonic()
            await self._send(key, body)

    async def _send(self, key: str, body: dict[str, Any]) -> bool:
        """Send until an answer has a uuid, for 20 seconds; a tenth of the calls have a very short timeout."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            timeout = 0.02 if self.chance.random() < 0.1 else 5.0
            api, headers = self.chance.choice(self.apis), {"Idempotency-Key": key}
            with suppress(*_CUT_OFF):
                response = await api.post("/v1/request", json=body, headers=headers, timeout=timeout)
                uuid = response.json()["data"]["uuid"] if response.is_success else None
                is_replay = idempotency_key_header.REPLAYED in response.headers
                self.record.answers.append(Answer(key, response.status_code, uuid, is_replay))
                if uuid is not None:
                    return True
            await asyncio.sleep(self.chance.uniform(0.0, 0.2))
        return False

    def _next(self) -> tuple[str, dict[str, Any]]:
        """Return a new key and a body; every fortieth has a customer whom the mail server refuses."""
        number = next(self.numbers)
        key = f"case-{number}"
        prefix = REFUSED_RECIPIENT.decode() if number % 40 == 0 else ""
        return key, A_REQUEST | {"customer_email": f"{prefix}{key}@customer.example.com", "external_id": key}


class MailServer(ScriptedMailServer):
    """Refuses, stalls and dies on demand, and records which process handed over what."""

    def __init__(self, record: Record, chance: random.Random) -> None:
        super().__init__()
        self.quotes = False  # the link, in every reply to a content
        self.quoted: set[str] = set()  # the secrets in these links
        self.death_rate = 0.0  # the share of acceptances whose reply is lost
        self.held = 0  # replies that wait for `release`
        self._to_hold: tuple[str, str] | None = None
        self._released = asyncio.Event()
        self._record, self._chance = record, chance
        # The acceptances whose reply the sender may not have read yet.
        self._unread: WeakKeyDictionary[Session, Acceptance] = WeakKeyDictionary()

    @contextmanager
    def holding(self, process: str = "", command: str = "") -> Iterator[None]:
        """Hold the replies to this command of this process, or all, until the end or `release`."""
        self._to_hold = process, command
        self._released.clear()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._to_hold = None
        self._released.set()

    def refusing(self) -> AbstractContextManager[object]:
        """Refuse every e-mail for now."""
        refusal = b"451 4.3.0 try again later"
        return patch.dict(self.replies, RCPT=refusal, content=refusal)

    def stop(self) -> None:
        """Break every connection. A reply that the sender may not have read counts as lost."""
        for acceptance in self._unread.values():
            acceptance.answered = False
        super().stop()

    async def reply_to(self, session: Session, command: str, sent: bytes) -> bytes | None:
        """Return the reply to a command, or None to close the connection."""
        if command != "content":
            self._unread.pop(session, None)  # The sender goes on, so it has read the reply before.
        await self._wait(_EVERYTHING)
        reply = await super().reply_to(session, command, sent)
        if command == "RCPT" and b"<" + REFUSED_RECIPIENT in sent:
            reply = b"550 5.1.1 no such mailbox"
        if command == "content" and reply == ACCEPTED:
            reply = self._accept(session, sent)
        await self._wait(_EVERYTHING, (session.sender, command))
        return reply

    async def _wait(self, *held: tuple[str, str]) -> None:
        if self._to_hold in held:
            self.held += 1
            try:
                await self._released.wait()
            finally:
                self.held -= 1

    def _accept(self, session: Session, content: bytes) -> bytes | None:
        """Accept an e-mail, and return the reply. None when the connection breaks instead of a reply."""
        message_id, recipient, link = (
            found[1].decode() if (found := pattern.search(text)) else ""
            for pattern, text in ((_MESSAGE_ID, content), (_ADDRESS, session.recipient), (_LINK, content))
        )
        acceptance = Acceptance(message_id, recipient, session.sender, session.connected_at, time.monotonic())
        self._record.acceptances.append(acceptance)
        if self._chance.random() < self.death_rate:
            acceptance.answered = False
            return None
        self._unread[session] = acceptance
        if not self.quotes or not link:
            return ACCEPTED
        self.quoted.add(link[-43:])  # the secret
        return ACCEPTED + f": {link}".encode()


async def declare(channel: AbstractChannel) -> None:
    """Declare the product's topology, and the harness's queues."""
    await declare_topology(channel)
    switch = await channel.declare_exchange(SWITCH, ExchangeType.FANOUT, durable=True)
    quorum: dict[str, Any] = {"x-queue-type": "quorum"}
    auditor = await channel.declare_queue(AUDITOR, durable=True, arguments=quorum)
    team = await channel.declare_queue(TEAM, durable=True, arguments=quorum)
    for queue in (auditor, team, await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)):
        await queue.bind(switch)
    for event in (Event.EMAIL_SENT, Event.EMAIL_FAILED, Event.CALCULATED):
        await auditor.bind(topology.REQUESTS, event)
    await switch.bind(topology.REQUESTS, Event.CREATED)


async def audit(url: str, record: Record) -> None:
    """Record every event, when it came and in which order, before acknowledging it. Until cancelled."""

    async def receive(_: AbstractChannel, message: AbstractIncomingMessage) -> None:
        event = msgspec.json.decode(message.body, type=CloudEvent[dict[str, Any]])
        assert event.id == message.message_id
        key, sequence = event.data["external_id"], event.data["sequence"]
        redelivered = bool(message.redelivered)
        record.arrivals.append(Arrival(event.id, key, event.type, sequence, time.monotonic(), redelivered))

    await _read(url, AUDITOR, receive)


async def calculate(url: str) -> None:
    """Answer each request.created with calculation.created, at least once. Until cancelled."""

    async def receive(channel: AbstractChannel, message: AbstractIncomingMessage) -> None:
        uuid = msgspec.json.decode(message.body, type=CloudEvent[RequestCreated]).data.uuid
        exchange = await channel.get_exchange(topology.CALCULATIONS, ensure=False)
        body = msgspec.json.encode(CalculationCreated(uuid, calculation_of(uuid)))
        answer = Message(body, delivery_mode=DeliveryMode.PERSISTENT, message_id=calculation_of(uuid))
        async with asyncio.timeout(30.0):
            await exchange.publish(answer, topology.CALCULATION_RESULTS.routing_key, mandatory=True)

    await _read(url, TEAM, receive)


def calculation_of(uuid: str) -> str:
    return f"calculation-of-{uuid}"


async def _read(
    url: str, queue: str, receive: Callable[[AbstractChannel, AbstractIncomingMessage], Awaitable[None]]
) -> None:
    """Read a queue on its own connection; connect again whenever it is lost."""
    while True:
        with suppress(*BROKER_ERRORS):
            async with open_channel(url) as channel:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await channel.set_qos(prefetch_count=50)
                    messages = (await channel.get_queue(queue, ensure=False)).iterator()
                    await messages.consume()
                async for message in messages:
                    await receive(channel, message)
                    await message.ack()
        await asyncio.sleep(0.05)
