"""Floods: what one caller or one team's account can send at once, and what others get meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
from aio_pika import Message

from service.outbox.events import CalculationCreated
from tests.faults.catalogue.fault import fault
from tests.faults.catalogue.malformed import poison_id
from tests.faults.verdict.invariants import uuid_in
from tests.faults.verdict.records import CALCULATED, LIVEZ, Interval
from tests.faults.world.teams import calculation_of
from tests.faults.world.workers import Worker
from tests.faults.world.world import World
from tests.harness import queues
from tests.harness.examples import A_REQUEST, STRUCTURE
from tests.harness.raw_connection import connect_to, head_with
from tests.harness.waiting import eventually, until
from worker.rabbitmq import topology

_RETRIEVE = "GET /v1/request/req_0 HTTP/1.1"
_QUESTIONNAIRE = f"GET {STRUCTURE} HTTP/1.1"
_PATIENCE_SECONDS = 5.0  # of every caller
_PAUSE_SECONDS = 0.05  # between two calls of another caller
_LONGEST_SECONDS = 30.0  # for the queue to be empty again
_CONNECTIONS = 530
_TOKENS_EACH = 3
_BETWEEN_TOKENS_SECONDS = 1.0
_LARGE_BODIES = 75  # of each kind
_EMPTY_OBJECTS: list[dict[str, str]] = [{}] * 87_000  # 255 KiB of JSON, and seven megabytes of Python objects
_DEEP_MESSAGE = msgspec.json.encode({"a": [{}] * 43_600})  # almost the largest that RabbitMQ takes
_DEEP_MESSAGES = 240
_REPEATS = 5_000


@fault("made-up keys", "api", repeats=False)
async def send_made_up_keys(world: World) -> bool:
    """Calls over hundreds of connections, with tokens whose key the issuer does not publish."""
    api = world.chance.choice(world.of_role("api"))
    kids = [f"made-up-{world.chance.random()}" for _ in range(_CONNECTIONS * _TOKENS_EACH)]
    calls = [head_with(world.issuer.token(headers={"kid": kid}), line=_QUESTIONNAIRE) for kid in kids]

    async def send(number: int) -> bool:
        await asyncio.sleep(number / _CONNECTIONS)
        answered = False
        for call in calls[number::_CONNECTIONS]:
            answered, _ = await asyncio.gather(
                _call(api.base_url, call), asyncio.sleep(_BETWEEN_TOKENS_SECONDS)
            )
        return answered

    async with _observed(world, [api]):
        return any(await asyncio.gather(*map(send, range(_CONNECTIONS))))


@fault("large wrong bodies", "api", "postgres links", repeats=False)
async def send_large_wrong_bodies(world: World) -> bool:
    """Creates with one large wrong field, while the API waits for Postgres."""
    api = world.chance.choice(world.of_role("api"))
    token, wrong = world.issuer.token(), A_REQUEST | {"calculation_fee_exempt": True}
    bodies = [
        msgspec.json.encode(wrong | {"calculation_fee_exempt_reason": _EMPTY_OBJECTS}),
        msgspec.json.encode(wrong | {"meta_data": {"a": _EMPTY_OBJECTS}}),
    ]
    calls = [head_with(token, f"Content-Length: {len(body)}") + body for body in bodies] * _LARGE_BODIES
    api.postgres.hold()
    try:
        async with _observed(world, [api]):
            return any(await asyncio.gather(*(_call(api.base_url, call) for call in calls)))
    finally:
        api.postgres.resume()


@fault("deep messages", "messages", "broker", "calculations", repeats=False)
async def send_deep_messages(world: World) -> bool:
    """Malformed messages that are small for RabbitMQ, and large once they are decoded."""
    ids = [poison_id(world, topology.CALCULATION_RESULTS) for _ in range(_DEEP_MESSAGES)]
    return await _publish_results(world, [Message(_DEEP_MESSAGE, message_id=each) for each in ids])


@fault("one calculation repeated", "messages", "broker", "calculations", repeats=False)
async def repeat_calculation(world: World) -> bool:
    """A calculation that was recorded arrives again, thousands of times at once."""
    arrivals = world.record.arrivals
    recorded = await eventually(lambda: [each.event_id for each in arrivals if each.type == CALCULATED])
    uuid = uuid_in(recorded[-1])
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
        await until(lambda: queues.holds(channel, queue.name, 0), seconds=_LONGEST_SECONDS)
    world.record.floods.append(Interval(began, time.monotonic()))
    return None not in confirms


@asynccontextmanager
async def _observed(world: World, victims: Sequence[Worker]) -> AsyncIterator[None]:
    """Call the processes as others do during a flood, and record what they get, and the memory it took."""
    others = [asyncio.create_task(_call_on(world, victim, LIVEZ)) for victim in victims]
    others += [asyncio.create_task(_call_on(world, api, _RETRIEVE)) for api in victims if api.role == "api"]
    try:
        yield
    finally:
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        for victim in victims:
            peak = victim.peak_megabytes()
            world.record.peaks[victim.name] = max(peak, world.record.peaks.get(victim.name, 0.0))


async def _call_on(world: World, worker: Worker, line: str) -> None:
    call = head_with(world.issuer.token(), line=line)
    while True:
        url = worker.probes_url if line == LIVEZ else worker.base_url
        world.record.calls.setdefault(line, []).append(await _call(url, call))
        await asyncio.sleep(_PAUSE_SECONDS)


async def _call(url: str, call: bytes) -> bool:
    """Make a call on a new connection. Return whether it was answered in time."""
    with suppress(OSError, asyncio.IncompleteReadError):
        connection = await connect_to(url)
        try:
            connection.send(call)
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await connection.answer()
        finally:
            connection.hang_up()
        return True
    return False
