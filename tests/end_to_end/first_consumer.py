"""The first program of a calculation team. worker/README.md quotes all that follows."""

import asyncio
import json
from contextlib import suppress
from os import environ

from aio_pika import Message, connect


async def main() -> None:
    async with await connect(environ["AMQP_URL"]) as broker, broker.channel(on_return_raises=True) as channel:
        await channel.set_qos(prefetch_count=10)
        queue = await channel.declare_queue("calculator", durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind("calculation-requests", "request.created")
        calculations = await channel.get_exchange("calculations")
        print("Waiting for requests. Ctrl-C ends this program.")
        async for event in queue.iterator():
            uuid = json.loads(event.body)["data"]["uuid"]
            calculation = json.dumps({"request_uuid": uuid, "calculation_id": f"calc_{uuid}"})
            trace = {name: value for name, value in event.headers.items() if name == "traceparent"}
            await calculations.publish(Message(calculation.encode(), headers=trace), "calculation.created")
            await event.ack()
            print(f"sent calc_{uuid}")


with suppress(KeyboardInterrupt):
    asyncio.run(main())
