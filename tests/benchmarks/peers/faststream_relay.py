"""The relay of faststream-outbox to RabbitMQ, as documented: `faststream_relay.py schema|relay`.

Tuned: more workers, larger batches fetched, and delivered rows deleted many at a time.
"""

import os
import sys
from typing import Any

import uvloop
from faststream import FastStream
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange
from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import create_async_engine

TUNED = {"max_workers": 40, "fetch_batch_size": 500, "terminal_flush_batch_size": 100}


async def main(task: str) -> None:
    """Relay until SIGTERM."""
    metadata = MetaData()
    table = make_outbox_table(metadata, table_name="outbox")
    url = os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+asyncpg://")
    engine = create_async_engine(url, pool_size=TUNED["max_workers"] + 5)  # it holds one for each worker
    if task == "schema":
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        return
    outbox = OutboxBroker(engine, outbox_table=table)
    rabbit = RabbitBroker(os.environ["AMQP_URL"])
    publisher = rabbit.publisher(
        exchange=RabbitExchange("calculation-requests", type=ExchangeType.TOPIC, durable=True),
        routing_key="request.created",
        persist=True,
    )

    @publisher
    @outbox.subscriber("requests", **TUNED)
    async def relay(body: dict[str, Any]) -> dict[str, Any]:
        return body

    await FastStream(outbox, on_startup=[rabbit.connect]).run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
