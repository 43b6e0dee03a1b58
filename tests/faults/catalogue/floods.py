"""What one caller or one team's account can send: floods, and what can never be handled."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial

import msgspec
from aio_pika import DeliveryMode, Message

from service.calculation_requests.changing import WRITE_EVENTS
from service.identifiers import new_request_id, uuid_of
from service.outbox.events import CalculationCreated
from tests.faults.catalogue.processes import each
from tests.faults.invariants import uuid_in
from tests.faults.others import calculation_of
from tests.faults.records import LIVEZ, Event, Span
from tests.faults.world import Worker, World, fault
from tests.harness import queues
from tests.harness.examples import A_REQUEST, STRUCTURE
from tests.harness.http import connect_to, head
from tests.harness.queues import UNDECODABLE, RawMessage
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually, until
from worker.rabbitmq import topology

_CONNECTIONS = 530
_EMPTY_OBJECTS: list[dict[str, str]] = [{}] * 87_000  # 255 KiB of JSON, and seven megabytes of Python objects
_DEEP_MESSAGE = msgspec.json.encode({"a": [{}] * 43_600})  # almost the largest that RabbitMQ takes
_REPEATS = 5_000


@fault("made-up keys", "api")
async def send_made_up_keys(world: World) -> bool:
    """Calls over hundreds of connections, with tokens whose key the issuer does not publish."""
    api = world.one_of("api")
    kids = [f"made-up-{world.chance.random()}" for _ in range(3 * _CONNECTIONS)]
    calls = [head(world.issuer.token(headers={"kid": kid}), line=f"GET {STRUCTURE} HTTP/1.1") for kid in kids]

    async def send(number: int) -> bool:
        await asyncio.sleep(number / _CONNECTIONS)
        answered = False
        for call in calls[number::_CONNECTIONS]:
            answered, _ = await asyncio.gather(_call(api.base_url, call), asyncio.sleep(1.0))
        return answered

    async with _observed(world, [api]):
        return any(await asyncio.gather(*map(send, range(_CONNECTIONS))))


@fault("large wrong bodies", "api", "postgres links")
async def send_large_wrong_bodies(world: World) -> bool:
    """Creates with one large wrong field, while the API waits for Postgres."""
    api = world.one_of("api")
    wrong_fields = ({"calculation_fee_exempt_reason": _EMPTY_OBJECTS}, {"meta_data": {"a": _EMPTY_OBJECTS}})
    bodies = [
        msgspec.json.encode(A_REQUEST | {"calculation_fee_exempt": True} | wrong) for wrong in wrong_fields
    ]
    token = world.issuer.token()
    calls = [head(token, f"Content-Length: {len(body)}") + body for body in bodies] * 75
    async with each([api.postgres], TcpProxy.hold, TcpProxy.resume), _observed(world, [api]):
        return any(await asyncio.gather(*(_call(api.base_url, call) for call in calls)))


@fault("deep messages", "messages", "broker", "calculations")
async def send_deep_messages(world: World) -> bool:
    """Malformed messages that are small for RabbitMQ, and large once they are decoded."""
    ids = [_poison_id(world, topology.CALCULATION_RESULTS) for _ in range(240)]
    return await _publish_results(world, [Message(_DEEP_MESSAGE, message_id=id_) for id_ in ids])


@fault("one calculation repeated", "messages", "broker", "calculations")
async def repeat_calculation(world: World) -> bool:
    """A calculation that was recorded arrives again, thousands of times at once."""
    found = world.record.arrivals
    recorded = await eventually(lambda: [event for event in found if event.type == Event.CALCULATED])
    uuid = uuid_in(recorded[-1].event_id)
    body = msgspec.json.encode(CalculationCreated(uuid, calculation_of(uuid)))
    return await _publish_results(world, [Message(body)] * _REPEATS)


async def _publish_results(world: World, messages: Sequence[Message]) -> bool:
    """Publish as a team does, and wait until the queue is empty again. Returns whether all was confirmed."""
    queue, began = topology.CALCULATION_RESULTS, time.monotonic()
    async with (
        _observed(world, world.of_role("calculations")),
        queues.open_channel(world.servers.broker_url) as channel,
    ):
        exchange = await channel.get_exchange(topology.CALCULATIONS, ensure=False)
        publish = partial(exchange.publish, routing_key=queue.routing_key, mandatory=True)
        confirms = await asyncio.gather(*map(publish, messages))
        await until(lambda: queues.holds(channel, queue.name, 0), seconds=30.0)
    world.record.floods.append(Span(queue.name, began, time.monotonic()))
    return None not in confirms


@asynccontextmanager
async def _observed(world: World, victims: Sequence[Worker]) -> AsyncIterator[None]:
    """Call the processes as others do during a flood, and record what they get, and the memory it took."""

    async def call_on(url: str, line: str) -> None:
        call = head(world.issuer.token(), line=line)
        while True:
            world.record.calls[line].append(await _call(url, call))
            await asyncio.sleep(0.05)

    others = [asyncio.create_task(call_on(victim.probes_url, LIVEZ)) for victim in victims]
    apis = [victim for victim in victims if victim.role == "api"]
    others += [asyncio.create_task(call_on(api.base_url, "GET /v1/request/req_0 HTTP/1.1")) for api in apis]
    try:
        yield
    finally:
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        for victim in victims:
            world.record.peaks[victim.name].append(victim.peak_megabytes())


async def _call(url: str, call: bytes) -> bool:
    """Make a call on a new connection. Return whether it was answered in time."""
    with suppress(OSError, asyncio.IncompleteReadError):
        connection = await connect_to(url)
        try:
            connection.send(call)
            async with asyncio.timeout(5.0):
                await connection.answer()
        finally:
            connection.hang_up()
        return True
    return False


@fault("poison rows", "rows", "postgres")
async def poison_outbox(world: World) -> bool:
    """Events that no AMQP message can carry, some with a good event behind them."""
    too_long = "request." + "x" * 300  # A routing key holds 255 bytes.
    rows = [new_request_id() for _ in range(world.chance.randint(1, 5))]
    events = [(row, 1, too_long) for row in rows]
    events += [(row, 2, Event.CALCULATED) for row in rows if world.chance.random() < 0.5]
    world.record.poison_rows.update(f"{uuid_of(row)} {event}" for row, _, event in events)
    rest = ("poison", datetime.now(UTC), '{"poison": true}', None)
    values = [(*event, *rest) for event in events]
    await world.on_postgres(lambda connection: connection.executemany(WRITE_EVENTS, values))
    return True


@fault("poison messages", "messages", "broker")
async def poison_queues(world: World) -> bool:
    """Messages on both queues that can never be handled, and a second calculation for a request."""
    unknown_request = uuid_of(new_request_id())
    bodies = [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"specversion": "1.0", "id": "x", "source": "x", "type": "other", "data": {}}',
        msgspec.json.encode(CalculationCreated(unknown_request, "calculation-of-nothing")),
    ]
    # Messages are found by their message_id.
    undecodable = [raw for raw in UNDECODABLE.values() if raw[0] != "message_id"]
    newest = "SELECT id FROM calculation_request WHERE calculation_id IS NOT NULL ORDER BY id DESC LIMIT 1"
    calculated = await world.on_postgres(lambda connection: connection.fetchval(newest))
    async with queues.open_channel(world.servers.broker_url) as channel:
        for queue in (topology.NOTIFICATIONS, topology.CALCULATION_RESULTS):
            sent = world.chance.sample(bodies, k=3)
            if calculated and queue is topology.CALCULATION_RESULTS:
                sent.append(msgspec.json.encode(CalculationCreated(uuid_of(calculated), "another")))
            messages = [
                Message(body, message_id=_poison_id(world, queue), delivery_mode=DeliveryMode.PERSISTENT)
                for body in sent
            ]
            for name, written in world.chance.sample(undecodable, k=3):
                messages.append(RawMessage(b"{}", name, written, message_id=_poison_id(world, queue)))
            for message in messages:
                await channel.default_exchange.publish(message, queue.name, mandatory=True)
    return True


def _poison_id(world: World, queue: topology.Queue) -> str:
    """Return the id of a new message for a queue that is to become a dead letter."""
    message_id = f"poison-{len(world.record.poison_messages)}"
    world.record.poison_messages.add(f"{queue.name} {message_id}")
    return message_id
