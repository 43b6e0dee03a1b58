"""The first program of a calculation team. worker/README.md explains it."""

import asyncio
import json
from contextlib import suppress
from os import environ
from urllib.parse import urlsplit

from aio_pika import Message, connect


async def main() -> None:
    async with await connect(environ["AMQP_URL"]) as broker, broker.channel(on_return_raises=True) as channel:
        await channel.set_qos(prefetch_count=10)
        queue = await channel.declare_queue("calculator", durable=True, arguments={"x-queue-type": "quorum"})
        for event_type in ("request.created", "request.calculated"):
            await queue.bind("calculation-requests", event_type)
        calculations = await channel.get_exchange("calculations")
        print("Waiting for requests. Ctrl-C ends this program.")
        async for event in queue.iterator():
            data = json.loads(event.body)["data"]
            if event.routing_key == "request.calculated":
                print(f"accepted {data['calculation_id']}")
            else:
                calculation = {"request_uuid": data["uuid"], "calculation_id": f"calc_{data['uuid']}"}
                trace = {name: value for name, value in event.headers.items() if name == "traceparent"}
                message = Message(
                    json.dumps(calculation).encode(),
                    headers=trace,
                    message_id=calculation["calculation_id"],
                    user_id=urlsplit(environ["AMQP_URL"]).username,
                )
                await calculations.publish(message, "calculation.created")
                print(f"sent {calculation['calculation_id']}")
            await event.ack()


with suppress(KeyboardInterrupt):
    asyncio.run(main())
