"""The AsyncAPI document is true of a real broker: of the messages sent and accepted, and of the queues."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
import pytest
from aio_pika import ExchangeType, Message

from service.contracts import asyncapi
from service.identifiers import parse_uuid
from service.outbox import events
from service.outbox.events import CloudEvent, RequestCreated
from service.outbox.lanes import RelayWaker
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import store, take
from worker.consumers import calculations, incoming, notifications
from worker.rabbitmq import topology
from worker.relay.outbox_tables import OutboxRow

DOCUMENT: dict[str, Any] = msgspec.to_builtins(asyncapi.document())
MESSAGES = DOCUMENT["components"]["messages"]


def example_of(message: str) -> dict[str, Any]:
    """Return the example that the document has of a message."""
    example: dict[str, Any] = MESSAGES[message]["examples"][0]
    return example


def row_of(payload: Mapping[str, Any]) -> OutboxRow:
    """Return the row of the outbox that an event would have."""
    event = next(example for example in asyncapi.SENT_EXAMPLES if example.type == payload["type"])
    time = datetime.fromisoformat(payload["time"])
    request_id = parse_uuid(event.uuid)
    assert request_id is not None
    return OutboxRow(
        lane=0,
        id=1,
        request_id=request_id,
        type=event.type,
        sequence=event.sequence,
        traceparent=payload["traceparent"],
        payload=events.encode(event, time=time, traceparent=payload["traceparent"]),
        created_at=time,
        attempts=0,
        must_wait=False,
    )


@pytest.mark.parametrize("event", events.SENT, ids=lambda event: event.type)
async def test_example_of_an_event_is_what_is_published(publisher, tap, event):
    example = example_of(event.type)

    outcome = await publisher.publish([row_of(example["payload"])])

    message = await eventually(lambda: take(tap))
    assert outcome.confirmed == {1}
    assert message.routing_key == DOCUMENT["channels"][event.type]["address"]
    assert message.content_type == MESSAGES[event.type]["contentType"]
    assert message.type == MESSAGES[event.type]["bindings"]["amqp"]["messageType"]
    assert message.headers == example["headers"]
    assert msgspec.json.decode(message.body) == example["payload"]


def test_example_of_a_created_request_is_what_the_notifications_read():
    payload = msgspec.json.encode(example_of(RequestCreated.type)["payload"])

    read = msgspec.json.decode(payload, type=CloudEvent[RequestCreated])

    assert read.data == asyncapi.SENT_EXAMPLES[0]
    assert notifications.decode(incoming.read(payload), None) is not None


@pytest.mark.parametrize("name", asyncapi.RECEIVED_EXAMPLES)
async def test_example_of_a_calculation_is_recorded(channel, worker_settings, pool, database, name):
    payload = example_of(name)["payload"]
    data = payload.get("data", payload)
    request = await store(database)
    request_id = parse_uuid(data["request_uuid"])
    await database.execute("UPDATE calculation_request SET id = $1 WHERE id = $2", request_id, request.id)
    binding = DOCUMENT["channels"]["calculation.created"]
    exchange = await channel.get_exchange(binding["bindings"]["amqp"]["exchange"]["name"])
    message = Message(msgspec.json.encode(payload), content_type=MESSAGES[name]["contentType"])

    async def recorded() -> bool:
        recorded_id = await database.fetchval(
            "SELECT calculation_id FROM calculation_request WHERE id = $1", request_id
        )
        return bool(recorded_id == data["calculation_id"])

    consumer = calculations.consumer(worker_settings, pool, RelayWaker(pool, seconds=5.0))
    async with running(consumer.run):
        await exchange.publish(message, binding["address"], mandatory=True)
        assert await eventually(recorded)


@pytest.mark.parametrize("name", DOCUMENT["channels"])
async def test_exchanges_and_queues_are_what_the_document_says(channel, name):
    described = DOCUMENT["channels"][name]["bindings"]["amqp"]

    # RabbitMQ refuses to declare again what has other properties.
    if described["is"] == "queue":
        queue = next(queue for queue in topology.QUEUES if queue.name == described["queue"]["name"])
        assert queue.arguments["x-queue-type"] == described["x-queue-type"]
        await channel.declare_queue(
            queue.name,
            durable=described["queue"]["durable"],
            exclusive=described["queue"]["exclusive"],
            auto_delete=described["queue"]["autoDelete"],
            arguments=queue.arguments,
        )
    else:
        exchange = described["exchange"]
        await channel.get_exchange(exchange["name"])
        await channel.declare_exchange(
            exchange["name"],
            ExchangeType(exchange["type"]),
            durable=exchange["durable"],
            auto_delete=exchange["autoDelete"],
        )
