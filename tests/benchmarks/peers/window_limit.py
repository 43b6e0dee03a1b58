"""The limit of aio-pika without a database: `window_limit.py FILE COUNT`, 500 publishes at a time."""

import asyncio
import sys
from pathlib import Path

import aio_pika
import uvloop
from message import AMQP_URL, EXCHANGE, ROUTING_KEY, event_id, properties

WINDOW = 500


async def main(payload: bytes, count: int) -> None:
    """Publish *count* messages, then wait to be killed."""
    connection = await aio_pika.connect_robust(AMQP_URL)
    exchange = await (await connection.channel()).get_exchange(EXCHANGE)
    id_ = event_id(payload)
    for start in range(0, count, WINDOW):
        window = range(start, min(start + WINDOW, count))
        await asyncio.gather(
            *(
                exchange.publish(aio_pika.Message(payload, **properties(f"{id_}.{number}")), ROUTING_KEY)
                for number in window
            )
        )
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]).read_bytes(), int(sys.argv[2])))
