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
from typing import Any

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
        await asyncio.gather(
            *(
                _call(client, results, f"{prefix}-{caller}", _CALLERS / rate, is_over)
                for caller in range(_CALLERS)
            )
        )


async def _call(
    client: httpx.AsyncClient, results: AbstractExchange, name: str, pause: float, is_over: asyncio.Event
) -> None:
    """Keep to the rate: what an outage has delayed is sent after it."""
    number = 0
    began = time.monotonic()
    while not is_over.is_set():
        number += 1
        create = await _create(client, f"{name}-{number}")
        if create["uuid"] is not None:
            await _calculate(results, create["uuid"])
        print(json.dumps(create), flush=True)  # noqa: T201
        await asyncio.sleep(max(0.0, began + number * pause - time.monotonic()))


async def _create(client: httpx.AsyncClient, key: str) -> dict[str, Any]:
    """Create a request. Repeat the call until it gets 200, as a caller may with an Idempotency-Key."""
    body = SMALLEST_REQUEST | {"customer_email": f"{key}@example.com"}
    failures: list[str] = []
    for _ in range(_TRIES):
        try:
            answer = await client.post("/v1/request", json=body, headers={"Idempotency-Key": key})
        except httpx.HTTPError as error:
            failures.append(type(error).__name__)
        else:
            if answer.status_code == httpx.codes.OK:
                return {"key": key, "uuid": answer.json()["data"]["uuid"], "failures": failures}
            failures.append(str(answer.status_code))
        await asyncio.sleep(_PAUSE_SECONDS)
    return {"key": key, "uuid": None, "failures": failures}


async def _calculate(results: AbstractExchange, uuid: str) -> None:
    """Send calculation.created, and wait until RabbitMQ has confirmed it."""
    body = json.dumps({"request_uuid": uuid, "calculation_id": f"calculation-of-{uuid}"}).encode()
    message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await results.publish(message, topology.CALCULATION_RESULTS.routing_key, mandatory=True, timeout=30.0)


asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
