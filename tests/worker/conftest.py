"""What the tests of the worker have in common: stored requests, their events, and what the broker got."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
import pytest
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from structlog.testing import capture_logs

from service.calculation_requests.changing import change
from service.calculation_requests.email_changes import FirstEmail, add_first
from service.calculation_requests.model import CalculationRequest
from service.identifiers import new_request_id
from service.outbox import asyncapi
from service.outbox.events import RequestCreated, RequestEmailSent
from service.outbox.waking import RelayWaker
from service.postgres.pool import Connection, open_pool
from service.server.probes import NotReady
from tests.harness import databases, stored
from tests.harness.in_process import running
from tests.harness.mail_server import ScriptedMailServer
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from worker.consumers import calculations
from worker.mail.postman import Postman
from worker.rabbitmq import topology
from worker.rabbitmq.connection import open_channel
from worker.relay import pointers
from worker.relay.loop import Relay
from worker.relay.pointers import OutboxEvent
from worker.relay.publisher import Publisher
from worker.settings import EmailSettings, WorkerSettings

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def store(
    connection: Connection, *, traceparent: str | None = None, **fields: Any
) -> CalculationRequest:
    """Store a request as the API does, which puts its request.created into the outbox."""
    request = stored.new_request(**fields)
    assert await stored.insert(connection, request, traceparent=traceparent)
    return request


async def store_old(connection: Connection, at: datetime, number: int = 0) -> CalculationRequest:
    """Store a request as one that was made then. Its id is the first one of that time, or a later one."""
    old_id = UUID(int=(int(at.timestamp() * 1000) << 80) + number)  # a UUIDv7 (RFC 9562, section 5.7)
    request = msgspec.structs.replace(stored.new_request(), id=old_id)
    assert await stored.insert(connection, request)
    await connection.execute("UPDATE calculation_request SET created_at = $1 WHERE id = $2", at, old_id)
    await connection.execute("UPDATE event SET time = $1 WHERE request_id = $2", at, old_id)
    return request


async def announce_next(connection: Connection, request_id: UUID) -> None:
    """Write the next event of a request, one that nobody needs to listen to."""
    async with connection.transaction(), change(connection, request_id) as request:
        request.announce(RequestEmailSent, email=1, kind="invitation")


def created_event(request: CalculationRequest) -> RequestCreated:
    return request.event(RequestCreated, sequence=1)


def created_body(request: CalculationRequest) -> bytes:
    return msgspec.json.encode(asyncapi.example_of(created_event(request)))


def outbox_event(number: int, **changes: Any) -> OutboxEvent:
    event = OutboxEvent(
        ctid=(0, number),
        request_id=new_request_id(),
        sequence=number,
        traceparent=None,
        written=time.monotonic(),
        attempts=0,
        is_held=False,
        type="request.calculated",
        event_id=str(number),
        time=datetime.now(UTC),
        payload=b"{}",
    )
    return msgspec.structs.replace(event, **changes)


@pytest.fixture
def logs():
    with capture_logs() as lines:
        yield lines


@pytest.fixture
async def stored_request(database):
    return await store(database)


@pytest.fixture
async def intended(database, stored_request):
    """A request whose request.created was published, and whose e-mail is due."""
    await add_first(database, [FirstEmail(stored_request.id)])
    await database.execute("DELETE FROM outbox")
    return stored_request


@pytest.fixture
def relay_waker(pool):
    return RelayWaker(pool, seconds=5.0)


@pytest.fixture
def calculation_consumer(worker_settings, pool, relay_waker):
    return calculations.consumer(worker_settings, pool, relay_waker)


@pytest.fixture
async def publisher(worker_settings):
    async with open_publisher(worker_settings) as opened:
        yield opened


@asynccontextmanager
async def open_publisher(settings: WorkerSettings) -> AsyncIterator[Publisher]:
    async with open_channel(settings, name="test") as channel:
        underlay = await channel.get_underlay_channel()
        yield Publisher(underlay, timeout_seconds=settings.broker_timeout_seconds)


@pytest.fixture
def relay(worker_settings, pool):
    """A relay that nobody wakes."""
    return Relay(worker_settings, pool, asyncio.Event())


@pytest.fixture
def relay_once(relay, publisher):
    """Make one pass of the relay; returns the number of events moved."""
    return partial(relay.relay_due, publisher)


@pytest.fixture
async def linked_pool(worker_settings, link):
    """A pool with one connection, on which `statements` are recorded."""
    settings = settings_with(worker_settings, database_url=link.url, database_pool_size=1)
    async with open_pool(settings) as opened:
        yield opened


@pytest.fixture
async def link(database_url, statements):
    """The worker's way to the test's database, which the test can cut."""
    async with TcpProxy(databases.as_role(database_url, "worker"), statements.watch) as forwarder:
        yield forwarder


@pytest.fixture
async def broker_link(worker_settings):
    async with TcpProxy(worker_settings.amqp_url) as forwarder:
        yield forwarder


def settings_with(settings: EmailSettings, **changes: Any) -> EmailSettings:
    return msgspec.structs.replace(settings, **changes)


@asynccontextmanager
async def open_postman(settings: EmailSettings) -> AsyncIterator[Postman]:
    """Yield a postman with a pool of its own, as another process would have."""
    async with open_pool(settings) as pool:
        yield Postman(settings, pool, asyncio.Event(), RelayWaker(pool, seconds=5.0))


@asynccontextmanager
async def running_postman(settings: EmailSettings, **changes: Any) -> AsyncIterator[Postman]:
    """Run a postman with *changes* to the settings until the block is left."""
    async with open_postman(settings_with(settings, **changes)) as postman, running(postman.run):
        yield postman


@asynccontextmanager
async def postman_held_before(
    marker: bytes, link: TcpProxy, settings: EmailSettings, **changes: Any
) -> AsyncIterator[Postman]:
    """Run a postman that sends all up to *marker* to the mail server, and the rest once *link* resumes."""
    link.hold_before(marker)
    async with running_postman(settings, smtp_url=link.url, **changes) as postman:
        await eventually(link.marker_reached.is_set)
        yield postman


@pytest.fixture
async def rude_server():
    """A mail server that can break the rules of SMTP."""
    async with ScriptedMailServer() as server:
        yield server


@pytest.fixture
async def mail_link(mail_server):
    async with TcpProxy(mail_server.url) as forwarder:
        yield forwarder


@pytest.fixture
async def postman(worker_settings):
    async with open_postman(worker_settings) as opened:
        yield opened


@pytest.fixture
async def tap(channel):
    """A queue that gets a copy of every event of ours."""
    return await bind_tap(channel, "request.*")


async def bind_tap(
    channel: AbstractChannel, routing_key: str, *, arguments: dict[str, Any] | None = None
) -> AbstractQueue:
    queue = await channel.declare_queue(exclusive=True, arguments=arguments)
    await queue.bind(topology.REQUESTS, routing_key)
    return queue


async def take(queue: AbstractQueue) -> AbstractIncomingMessage | None:
    return await queue.get(no_ack=True, fail=False)


async def take_all(queue: AbstractQueue) -> list[AbstractIncomingMessage]:
    messages = []
    while (message := await take(queue)) is not None:
        messages.append(message)
    return messages


async def take_ids(queue: AbstractQueue) -> list[str | None]:
    return [message.message_id for message in await take_all(queue)]


async def publish(channel: AbstractChannel, queue: topology.Queue, body: bytes, **properties: Any) -> None:
    """Publish a message the way its senders do, and see that it is routed."""
    exchange = await channel.get_exchange(queue.exchange)
    await exchange.publish(Message(body, **properties), queue.routing_key, mandatory=True)


async def obstacle(check: Callable[[], Awaitable[None]]) -> str:
    """Return why a readiness check fails, or nothing if it passes."""
    try:
        await check()
    except NotReady as error:
        return str(error)
    return ""


async def passes(check: Callable[[], Awaitable[None]]) -> bool:
    return not await obstacle(check)


async def hold_events(database: Connection, request_id: UUID) -> None:
    """Hold the events of a request, as if the broker had refused the first now."""
    async with database.transaction():
        locked = await pointers.lock(database, pending=1_000, held=1_000)
        (first,) = (event for event in locked if event.request_id == request_id)
        await pointers.hold(database, [first], {first.event_id: "why"}, base_seconds=100.0)
