"""The relay of txoutbox, as its documentation shows it: `txoutbox_relay.py schema|relay`.

Tuned: large batches, each published at once, delivered rows deleted, woken by NOTIFY. It keeps the order
within a request.
"""

import os
import sys

import aio_pika
import asyncpg
import uvloop
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage


async def main(task: str) -> None:
    """Relay until SIGTERM."""
    pool = await asyncpg.create_pool(os.environ["DATABASE_URL"], min_size=2, max_size=10)
    storage = PostgresStorage(pool, table="outbox", delete_on_ack=True, notify_channel="outbox")
    if task == "schema":
        await storage.create_schema()
        return
    connection = await aio_pika.connect_robust(os.environ["AMQP_URL"])
    channel = await connection.channel()  # with publisher confirms
    exchange = await channel.get_exchange("calculation-requests")

    async def publish(message: OutboxMessage) -> None:
        await exchange.publish(
            aio_pika.Message(
                message.payload,
                content_type="application/cloudevents+json",
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                message_id=str(message.id),
                type=message.topic,
            ),
            routing_key=message.topic,
        )

    relay = Relay(storage, publish, config=RelayConfig(batch_size=500, concurrency=500))
    await storage.listen(relay.wake)
    await relay.run(handle_signals=True)
    await connection.close()
    pool.terminate()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
