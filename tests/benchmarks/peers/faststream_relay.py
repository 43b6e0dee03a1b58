"""The outbox of faststream-outbox, relayed as its documentation shows it: `faststream_relay.py schema|relay`.

Tuned: large batches, many workers, deletes in batches, woken by NOTIFY. It keeps no order within a request.
"""

import os
import sys

import uvloop
from faststream import FastStream
from faststream.rabbit import RabbitBroker, RabbitExchange
from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import create_async_engine

WORKERS = 32
KEY = "request.created"

metadata = MetaData()
table = make_outbox_table(metadata, table_name="outbox")
engine = create_async_engine(
    os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+asyncpg://"), pool_size=WORKERS + 2
)
outbox = OutboxBroker(engine, outbox_table=table)
rabbit = RabbitBroker(os.environ["AMQP_URL"])
publisher = rabbit.publisher(
    exchange=RabbitExchange("calculation-requests", declare=False), routing_key=KEY, persist=True
)


@publisher
@outbox.subscriber(KEY, max_workers=WORKERS, fetch_batch_size=1_000, terminal_flush_batch_size=100)
async def relay(body: bytes) -> bytes:
    return body


async def main(task: str) -> None:
    """Relay until SIGTERM."""
    if task == "schema":
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        await engine.dispose()
        return
    await FastStream(outbox, on_startup=[rabbit.connect]).run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
