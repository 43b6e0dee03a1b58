"""The AsyncAPI document is true of a real broker, and the reference consumer of what consumers may get."""

import json
from typing import Any

import msgspec
import pytest
from aio_pika import DeliveryMode

from service.identifiers import uuid_of
from service.outbox import asyncapi
from tests.harness.waiting import eventually
from tests.worker.conftest import outbox_event, take
from tests.worker.reference_consumer import ReferenceConsumer
from worker.consumers import calculations, incoming
from worker.rabbitmq.topology import CALCULATION_RESULTS

DOCUMENT: dict[str, Any] = msgspec.to_builtins(asyncapi.document())
MESSAGES, CHANNELS = DOCUMENT["components"]["messages"], DOCUMENT["channels"]


async def test_example_of_each_event_is_what_is_published(publisher, tap):
    for event in asyncapi.SENT_EXAMPLES:
        described = MESSAGES[event.type]
        example = described["examples"][0]
        trace = example["payload"]["traceparent"]
        row = outbox_event(
            event.sequence,
            type=event.type,
            event_id=example["payload"]["id"],
            traceparent=trace,
            payload=msgspec.json.encode(asyncapi.example_of(event, traceparent=trace)),
            time=asyncapi.EXAMPLE_TIME,
        )

        outcome = await publisher.publish([row])

        message = await eventually(lambda: take(tap))
        assert outcome.confirmed == {row.event_id}
        assert (message.message_id, message.delivery_mode) == (row.event_id, DeliveryMode.PERSISTENT)
        assert (message.timestamp, message.content_type) == (row.time, described["contentType"])
        assert message.routing_key == CHANNELS[event.type]["address"]
        assert message.type == described["bindings"]["amqp"]["messageType"]
        assert message.headers == example["headers"]
        assert msgspec.json.decode(message.body) == example["payload"]


@pytest.mark.parametrize("name", asyncapi.RECEIVED_EXAMPLES)
def test_example_of_a_calculation_is_what_its_consumer_reads(name):
    payload = MESSAGES[name]["examples"][0]["payload"]
    data = payload.get("data", payload)

    read = calculations.decode(incoming.read(msgspec.json.encode(payload)), None)

    assert (uuid_of(read.request_id), read.calculation_id) == (data["request_uuid"], data["calculation_id"])


async def test_exchanges_are_what_the_document_says(channel):
    exchanges = {name: CHANNELS[name]["bindings"]["amqp"]["exchange"] for name in CHANNELS}
    calculations = (exchanges["calculation.created"]["name"], CHANNELS["calculation.created"]["address"])
    assert calculations == (CALCULATION_RESULTS.exchange, CALCULATION_RESULTS.routing_key)

    for each in exchanges.values():
        # RabbitMQ refuses to declare again what has other properties.
        await channel.get_exchange(each["name"])
        await channel.declare_exchange(
            each["name"], each["type"], durable=each["durable"], auto_delete=each["autoDelete"]
        )


@pytest.mark.parametrize(
    ("deliveries", "verdicts"),
    [
        ("a1 a2 a3", "new new new"),
        ("a1 a2 a2 a1 a3", "new new repeat repeat new"),
        ("a1 a3", "new gap"),
        ("a2 a3", "gap new"),
        ("a2 a1", "gap inversion"),
        ("a1 a3 a2 a4", "new gap inversion new"),
        ("a1 a3 a2 a2", "new gap inversion repeat"),
        ("a1 b1 a2 b2", "new new new new"),
        ("a1 a1-again-with-another-id", "new conflict"),
        ("a2 a1-redelivered a3", "gap late new"),
        ("a1 a2-redelivered", "new new"),
    ],
)
def test_each_delivery_is_judged_by_those_of_its_request_before(deliveries, verdicts):
    consumer, judged = ReferenceConsumer(), []
    for each in deliveries.split():
        body = json.dumps({"id": each, "data": {"uuid": each[0], "sequence": int(each[1])}}).encode()
        judged.append(consumer.take(body, redelivered=each.endswith("-redelivered")))

    assert judged == verdicts.split()
