"""The simplest relay: read a batch, publish one event after another, delete the batch."""

import asyncio

import aio_pika
import asyncpg
import uvloop
from message import AMQP_URL, EXCHANGE, ROUTING_KEY, event_id, postgres_url, properties


async def main() -> None:
    """Relay until killed."""
    postgres = await asyncpg.connect(postgres_url())
    connection = await aio_pika.connect_robust(AMQP_URL)
    exchange = await (await connection.channel()).get_exchange(EXCHANGE)
    while True:
        async with postgres.transaction():
            rows = await postgres.fetch(
                "SELECT lane, id, payload FROM outbox ORDER BY lane, id LIMIT 100 FOR UPDATE SKIP LOCKED"
            )
            for row in rows:
                message = aio_pika.Message(row["payload"], **properties(event_id(row["payload"])))
                await exchange.publish(message, ROUTING_KEY)  # waits for the confirm
            await postgres.executemany(
                "DELETE FROM outbox WHERE lane = $1 AND id = $2", [(row["lane"], row["id"]) for row in rows]
            )
        if not rows:
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    uvloop.run(main())
