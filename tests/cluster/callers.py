"""Callers of the API, and a team of calculations, in a pod: `python -c PROGRAM URL RATE PREFIX`.

It needs the variables ACCESS_TOKEN and AMQP_URL. Each line of the output is one create: its Idempotency-Key,
its uuid, and every try that did not get 200. The program ends at SIGTERM, after the creates in flight.
"""

import asyncio
import json
import os
import signal
import sys
import time

import aio_pika
import httpx
from aio_pika.abc import AbstractExchange

from service.api.openapi.examples import SMALLEST_REQUEST
from worker.rabbitmq import topology

_TRIES = 60
_PAUSE_SECONDS = 0.5
_CALLERS = 8


async def main(url: str, rate: float, prefix: str) -> None:
    """Send creates until SIGTERM. Each caller keeps its connection, as a gateway does."""
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    headers = {"Authorization": f"Bearer {os.environ['ACCESS_TOKEN']}"}
    async with (
        await aio_pika.connect(os.environ["AMQP_URL"]) as connection,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=10.0) as client,
    ):
        channel = await connection.channel(on_return_raises=True)
        results = await channel.get_exchange(topology.CALCULATIONS, ensure=False)

        async def call(name: str) -> None:
            """Keep to the rate: what an outage has delayed is sent after it."""
            number, began = 0, time.monotonic()
            while not is_over.is_set():
                number += 1
                await _create(client, results, f"{name}-{number}")
                await asyncio.sleep(max(0.0, began + number * _CALLERS / rate - time.monotonic()))

        await asyncio.gather(*(call(f"{prefix}-{caller}") for caller in range(_CALLERS)))


async def _create(client: httpx.AsyncClient, results: AbstractExchange, key: str) -> None:
    """Create a request, with as many tries as an Idempotency-Key allows, and send its calculation."""
    body = SMALLEST_REQUEST | {"customer_email": f"{key}@example.com"}
    uuid: str | None = None
    failures: list[str] = []
    while uuid is None and len(failures) < _TRIES:
        try:
            answer = await client.post("/v1/request", json=body, headers={"Idempotency-Key": key})
            answer.raise_for_status()
            uuid = answer.json()["data"]["uuid"]
        except httpx.HTTPStatusError as error:
            failures.append(str(error.response.status_code))
        except httpx.HTTPError as error:
            failures.append(type(error).__name__)
        if uuid is None:
            await asyncio.sleep(_PAUSE_SECONDS)
    if uuid is not None:
        calculation = {"request_uuid": uuid, "calculation_id": f"calculation-of-{uuid}"}
        persistent = aio_pika.DeliveryMode.PERSISTENT
        message = aio_pika.Message(json.dumps(calculation).encode(), delivery_mode=persistent)
        routing_key = topology.CALCULATION_RESULTS.routing_key
        await results.publish(message, routing_key, mandatory=True, timeout=30.0)  # and confirmed
    print(json.dumps({"key": key, "uuid": uuid, "failures": failures}), flush=True)  # noqa: T201


asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
