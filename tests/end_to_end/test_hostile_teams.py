"""A calculation team that floods the queue: the worker keeps its memory and records the others' results."""

import asyncio
import time
from collections.abc import Callable

import pytest
from aio_pika import Message
from aio_pika.abc import AbstractChannel

from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually
from tests.worker.conftest import store
from worker.consumers.incoming import LARGEST_BODY
from worker.rabbitmq.topology import CALCULATION_RESULTS

_LARGEST_MEGABYTES = 150.0
_AT_ONCE = 1_000
_BROKERS_LIMIT = 131_072  # max_message_size of the configurations in `deploy`
_RESULT = '{"request_uuid": "%s", "calculation_id": "calc-1"}'


async def publish_many(channel: AbstractChannel, bodies: list[bytes]) -> None:
    """Publish results as fast as the broker confirms them."""
    exchange = await channel.get_exchange(CALCULATION_RESULTS.exchange)
    for first in range(0, len(bodies), _AT_ONCE):
        batch = [Message(body) for body in bodies[first : first + _AT_ONCE]]
        await asyncio.gather(
            *(exchange.publish(message, CALCULATION_RESULTS.routing_key, mandatory=True) for message in batch)
        )


def many_objects(size: int) -> bytes:
    """Return JSON of this size that takes as much memory as possible once it is decoded."""
    return b'{"a":[' + b"{}," * ((size - 10) // 3) + b"{}]}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "body", "times"),
    [
        pytest.param(256, lambda _: many_objects(_BROKERS_LIMIT), 50, id="as large as the broker allows"),
        pytest.param(1_000, lambda _: many_objects(LARGEST_BODY), 50, id="as large as is read"),
        pytest.param(5_000, lambda uuid: (_RESULT % uuid).encode(), 5, id="repeats of one result"),
        pytest.param(10_000, lambda _: b"{", 5, id="malformed"),
    ],
)
async def test_result_behind_a_flood_is_recorded_in_time_by_a_process_that_keeps_its_memory(
    worker_settings, channel, database, tmp_path, count: int, body: Callable[[str], bytes], times: int
):
    """The limit is *times* the time to publish the flood, which grows with the machine's load, too."""
    repeated, good = await store(database), await store(database)
    began = time.monotonic()
    await publish_many(channel, [body(repeated.uuid)] * count + [(_RESULT % good.uuid).encode()])
    publishing = time.monotonic() - began
    worker = worker_process(worker_settings, tmp_path, "calculations")
    is_recorded = "SELECT calculation_id IS NOT NULL FROM calculation_request WHERE id = $1"

    async with started(worker):
        began = time.monotonic()
        await eventually(lambda: database.fetchval(is_recorded, good.id), seconds=600)
        took, megabytes = time.monotonic() - began, worker.peak_megabytes()

    print(f"{megabytes:.0f} MB, {took:.1f} s, published in {publishing:.1f} s")  # noqa: T201 - on failure
    assert megabytes < _LARGEST_MEGABYTES
    assert took < times * publishing
