"""Messages that can never be handled."""

import msgspec
from aio_pika import DeliveryMode, Message

from service.identifiers import new_request_id, uuid_of
from service.outbox.events import CalculationCreated
from tests.faults.catalogue.fault import fault
from tests.faults.world.world import World
from tests.harness import queues
from worker.rabbitmq import topology


@fault("poison messages", "messages", "broker", repeats=False)
async def poison_queues(world: World) -> None:
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
    async with queues.open_channel(world.servers.broker.url) as channel:
        for queue in topology.QUEUES:
            for body in world.chance.sample(bodies, k=3):
                message_id = f"poison-{len(world.record.poison_messages)}"
                world.record.poison_messages.add(f"{queue.name} {message_id}")
                message = Message(body, message_id=message_id, delivery_mode=DeliveryMode.PERSISTENT)
                await channel.default_exchange.publish(message, queue.name, mandatory=True)
