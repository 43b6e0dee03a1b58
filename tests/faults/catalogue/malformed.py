"""Rows and messages that can never be handled. At the end, the verdict finds each where it must be."""

from datetime import UTC, datetime

import msgspec
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel

from service.calculation_requests.changing import WRITE_EVENTS
from service.identifiers import new_request_id, uuid_of
from service.outbox.events import CalculationCreated
from service.postgres.pool import Connection
from tests.faults.catalogue.fault import fault
from tests.faults.world.world import World
from tests.harness import queues
from tests.harness.raw_messages import UNDECODABLE, RawMessage
from worker.rabbitmq import topology

_UNDECODABLE = [each for each in UNDECODABLE.values() if each[0] != "message_id"]  # by which they are found
_TOO_LONG_A_TYPE = "request." + "x" * 300  # a routing key holds 255 bytes


@fault("poison rows", "rows", "postgres", repeats=False)
async def poison_outbox(world: World) -> bool:
    """Events that no AMQP message can carry, some with a good event behind them."""
    rows = [new_request_id() for _ in range(world.chance.randint(1, 5))]
    with_follower = [row for row in rows if world.chance.random() < 0.5]
    world.record.poison_rows.update(f"{uuid_of(row)} {_TOO_LONG_A_TYPE}" for row in rows)
    world.record.poison_followers.update(f"{uuid_of(row)} request.calculated" for row in with_follower)

    rest = ("poison", datetime.now(UTC), '{"poison": true}', None)
    events = [(row, 1, _TOO_LONG_A_TYPE, *rest) for row in rows]
    events += [(row, 2, "request.calculated", *rest) for row in with_follower]
    await world.on_postgres(lambda connection: connection.executemany(WRITE_EVENTS, events))
    return True


@fault("poison messages", "messages", "broker", repeats=False)
async def poison_queues(world: World) -> bool:
    """Messages on both queues that can never be handled."""
    unknown_request = uuid_of(new_request_id())
    bodies = [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"specversion": "1.0", "id": "x", "source": "x", "type": "other", "data": {}}',
        msgspec.json.encode(CalculationCreated(unknown_request, "calculation-of-nothing")),
    ]
    other_calculation = await world.on_postgres(_another_calculation)
    async with queues.open_channel(world.servers.broker_url) as channel:
        for queue in (topology.NOTIFICATIONS, topology.CALCULATION_RESULTS):
            for body in world.chance.sample(bodies, k=3):
                await _publish_poison(world, channel, queue, body)
            for name, written in world.chance.sample(_UNDECODABLE, k=3):
                raw = RawMessage(b"{}", name, written, message_id=poison_id(world, queue))
                await channel.default_exchange.publish(raw, queue.name, mandatory=True)
        if other_calculation is not None:
            await _publish_poison(world, channel, topology.CALCULATION_RESULTS, other_calculation)
    return True


async def _another_calculation(connection: Connection) -> bytes | None:
    """Return a second, different calculation for a request that has one."""
    row = await connection.fetchval(
        "SELECT id FROM calculation_request WHERE calculation_id IS NOT NULL ORDER BY id DESC LIMIT 1"
    )
    return row and msgspec.json.encode(CalculationCreated(uuid_of(row), "another-calculation"))


async def _publish_poison(world: World, channel: AbstractChannel, queue: topology.Queue, body: bytes) -> None:
    message_id = poison_id(world, queue)
    message = Message(body, message_id=message_id, delivery_mode=DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, queue.name, mandatory=True)


def poison_id(world: World, queue: topology.Queue) -> str:
    """Return the id of a new message for a queue that is to become a dead letter."""
    message_id = f"poison-{len(world.record.poison_messages)}"
    world.record.poison_messages.add(f"{queue.name} {message_id}")
    return message_id
