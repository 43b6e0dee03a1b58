"""The calculation team: takes the answers, and announces calculations with its own RabbitMQ account.

It calculates no tax, because somebody would copy a wrong figure.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aio_pika
from aio_pika.abc import AbstractMessage
from litestar import post
from litestar.response import Redirect

from deploy.local.journey.resources import Journeys, Resources, TeamRequest, as_text, now


async def read_events(url: str | None, journeys: Journeys) -> None:
    """Take the events from a queue of the team. Connect again after a failure."""
    while url:
        try:
            async with await aio_pika.connect(url) as broker, broker.channel() as channel:
                queue = await channel.declare_queue("calculator.journey", exclusive=True)
                await queue.bind("calculation-requests", "request.*")
                async for message in queue.iterator(no_ack=True):
                    event = json.loads(message.body)
                    journey = journeys[event["subject"]]
                    journey.sent[event["type"]] = _transcript("calculation-requests", message, event)
        except Exception as error:  # noqa: BLE001 - also a malformed event: the pages would end with this task
            print(f"No events: {type(error).__name__}", flush=True)
        await asyncio.sleep(2.0)


@post("/requests/{uuid:str}/calculation")
async def announce(request: TeamRequest) -> Redirect:
    """Announce a calculation, or send a broken message: its calculation_id is a number.

    The id follows from the uuid, so a repeat has the same id.
    """
    uuid, journey = request.uuid, request.resources.journeys[request.uuid]
    if "is_broken" in await request.form():
        journey.sent["broken"] = await _publish(request.resources, uuid, 42)
        return Redirect(f"/requests/{uuid}#step-4", status_code=303)
    journey.sent["announced"] = await _publish(request.resources, uuid, f"calc_{uuid}")
    journey.times[4] = now()
    return Redirect(f"/requests/{uuid}#step-5", status_code=303)


async def _publish(resources: Resources, uuid: str, calculation_id: object) -> str:
    """Publish `calculation.created`, wait for RabbitMQ's confirm, and return the message as text."""
    if not (url := resources.settings.calculator_amqp_url):
        raise ConnectionRefusedError  # This team has no account.
    trace = re.search("00-([0-9a-f]{32})-", resources.journeys[uuid].sent.get("request.created", ""))
    trace_id = trace[1] if trace else secrets.token_hex(16)
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": f"{uuid4()}",
        "source": "/calculator",
        "type": "calculation.created",
        "subject": uuid,
        "time": now(),
        "datacontenttype": "application/json",
        "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01",
        "data": {"request_uuid": uuid, "calculation_id": calculation_id},
    }
    message = aio_pika.Message(
        json.dumps(event).encode(),
        content_type="application/cloudevents+json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        message_id=event["id"],
        user_id=urlsplit(url).username,  # RabbitMQ refuses any other name.
    )
    async with (
        asyncio.timeout(10.0),
        await aio_pika.connect(url) as broker,
        broker.channel(on_return_raises=True) as channel,
    ):
        exchange = await channel.get_exchange("calculations")
        await exchange.publish(message, "calculation.created")
    return f"{_transcript('calculations', message, event)}\n\nconfirmed by RabbitMQ"


def _transcript(exchange: str, message: AbstractMessage, event: Mapping[str, Any]) -> str:
    """Return a message of RabbitMQ as text."""
    lines = [f"exchange: {exchange}", f"routing key: {event['type']}", "delivery_mode: 2 (persistent)"]
    properties = {name: getattr(message, name) for name in ("content_type", "message_id", "user_id")}
    lines += [f"{name}: {value}" for name, value in properties.items() if value]
    return "\n".join([*lines, "", as_text(event)])
