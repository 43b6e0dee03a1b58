"""The first program of a calculation team, which worker/README.md explains, and the account that it needs."""

import asyncio
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from aio_pika.exceptions import ChannelNotFoundEntity
from yarl import URL

from deploy.local.machine.folders import CHECKOUT, Place
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from tests.deploy.pages import code_blocks
from tests.end_to_end.callers import create
from tests.harness.command_line import run
from tests.harness.processes import Process, bare_environment, started
from tests.harness.queues import count, declare_topology, holds, is_refused, open_channel, read, write
from tests.harness.servers import run_as_operator
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

PAGE = CHECKOUT / "worker" / "README.md"
SECTION = "First queue to first calculation"
PROGRAM = CHECKOUT / "tests" / "end_to_end" / "first_consumer.py"
QUEUE = "calculator"
AN_EVENT = b'{"data": {"uuid": "req_01a9ZkW3mT6qPxB8vNcR4d"}}'


def first_consumer(amqp_url: str, folder: Path) -> Process:
    environment = bare_environment(AMQP_URL=amqp_url)
    return Process("consumer", [sys.executable, PROGRAM], environment=environment, port=0, folder=folder)


@pytest.fixture
async def consumer(amqp_url, channel, tmp_path):
    """The program, not yet started. Its queue is removed afterwards."""
    yield first_consumer(amqp_url, tmp_path)
    await channel.queue_delete(QUEUE)


async def consumes(amqp_url: str) -> bool:
    with suppress(ChannelNotFoundEntity):
        async with open_channel(amqp_url) as channel:
            return bool((await channel.get_queue(QUEUE)).declaration_result.consumer_count)
    return False


async def test_requests_get_a_calculation_once_even_after_a_stop_and_a_replay(
    *, api, worker, consumer, caller, amqp_url, channel, environment, subscriber
):
    async def has_its_calculation(uuid: str) -> bool:
        record = (await caller.get(f"/v1/request/{uuid}")).json()["data"]
        return bool(record["calculation_id"] == f"calc_{uuid}")

    async def has_at_least(messages: int, queue: str) -> bool:
        return await count(channel, queue) >= messages

    calculations = await channel.declare_queue(exclusive=True)
    await calculations.bind(topology.CALCULATIONS, "#")
    async with started(api, worker):
        async with started(consumer, ready=False):
            await eventually(lambda: consumes(amqp_url))
            first = (await create(caller))["uuid"]
            await eventually(lambda: has_its_calculation(first))
        second = (await create(caller))["uuid"]
        await eventually(lambda: count(channel, QUEUE))
        async with started(consumer, ready=False):
            await eventually(lambda: has_its_calculation(second))
            await eventually(lambda: {"request.email_sent", "request.calculated"} <= subscriber.types(second))
            assert len({event["traceparent"][3:35] for event in subscriber.about(second)}) == 1
            replay = ("worker", "outbox", "replay", "--from", "2020-01-01T00:00:00Z")
            await run(*replay, environment=environment)
            await eventually(lambda: has_at_least(4, calculations.name))
            await eventually(lambda: holds(channel, topology.CALCULATION_RESULTS.name, 0))
            consumer.running.send_signal(signal.SIGINT)
            status = await consumer.exit_status()

    assert status == 0
    for result in ("sent", "accepted"):
        assert f"\n{result} calc_{second}\n" in consumer.output
    assert "Traceback" not in consumer.output
    assert await holds(channel, topology.CALCULATION_RESULTS.dead_letters, 0)
    assert len(subscriber.event_ids) == 6


@pytest.mark.long
async def test_account_of_a_team_is_enough_for_the_program_and_opens_nothing_else(tmp_path):
    account = code_blocks(PAGE, SECTION, "sh")[-1]
    reader = account.replace("calculations|", "").replace("calculator", "reader")
    # A node of its own, because accounts stay.
    with rabbitmq_node(Place(folder=tmp_path)) as broker:
        with_password = URL(broker.url).with_password("a-password")
        url, reader_url = (str(with_password.with_user(user)) for user in (QUEUE, "reader"))
        async with open_channel(broker.url) as channel:
            await declare_topology(channel)
            await asyncio.to_thread(run_as_operator, account + reader, broker, PASSWORD="a-password")
            async with started(first_consumer(url, tmp_path), ready=False):
                await eventually(lambda: consumes(broker.url))
                await write(channel, topology.REQUESTS, topology.NOTIFICATIONS.routing_key, AN_EVENT)
                await eventually(lambda: count(channel, topology.CALCULATION_RESULTS.name))

        calculate = partial(write, exchange=topology.CALCULATIONS)
        assert not await is_refused(url, calculate)
        assert await is_refused(reader_url, calculate)
        assert await is_refused(url, partial(write, exchange=topology.REQUESTS))
        assert await is_refused(url, partial(read, queue=topology.NOTIFICATIONS.name))
        assert await is_refused(url, lambda ours: ours.queue_delete(topology.NOTIFICATIONS.name))
