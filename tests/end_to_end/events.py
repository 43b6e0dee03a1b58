"""Other teams on RabbitMQ: a subscriber to the events, and a calculation team."""

import json
from dataclasses import dataclass, field
from typing import Any

from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from tests.harness.queues import write
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

ALL_ARE_DONE = """
    SELECT NOT EXISTS (SELECT FROM outbox)
       AND NOT EXISTS (SELECT FROM email WHERE state <> 'sent')
       AND NOT EXISTS (SELECT FROM calculation_request WHERE calculation_id IS NULL OR sequence < 3)
"""


@dataclass
class Subscriber:
    """Another team: gets every event about requests, in the order of delivery."""

    received: list[dict[str, Any]] = field(default_factory=list)

    async def receive(self, message: AbstractIncomingMessage) -> None:
        """Take one message."""
        self.received.append(json.loads(message.body))

    @property
    def event_ids(self) -> set[str]:
        """The ids of all events received, without repeats."""
        return {event["id"] for event in self.received}

    def about(self, uuid: str) -> list[dict[str, Any]]:
        """Return the events about one request."""
        return [event for event in self.received if event["subject"] == uuid]

    def types(self, uuid: str) -> set[str]:
        """Return the types of the events about one request."""
        return {event["type"] for event in self.about(uuid)}


async def publish_calculation(channel: AbstractChannel, uuid: str, calculation_id: str) -> None:
    body = json.dumps({"request_uuid": uuid, "calculation_id": calculation_id}).encode()
    place = (topology.CALCULATIONS, topology.CALCULATION_RESULTS.routing_key)
    await write(channel, *place, body, mandatory=True)


async def complete(uuid: str, channel: AbstractChannel, subscriber: Subscriber) -> None:
    """Calculate a request once its e-mail is sent, and wait for the last event about it."""
    await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
    await publish_calculation(channel, uuid, "calc-1")
    await eventually(lambda: "request.calculated" in subscriber.types(uuid))
