"""A policy of another team that matches our queues loses none of our messages."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from tests.deploy.pages import INSTALLATION, code_blocks
from tests.harness.in_process import running
from tests.harness.queues import holds
from tests.harness.servers import run_as_operator
from tests.harness.waiting import eventually
from tests.worker.conftest import publish, take_ids
from tests.worker.steps import bury
from worker.rabbitmq.topology import CALCULATION_RESULTS

QUEUE = CALCULATION_RESULTS
IDS = [f"message-{number}" for number in range(10)]


@pytest.fixture
def amqp_url(own_broker):
    """The URL of a RabbitMQ whose policies the test may change."""
    return own_broker.url


@pytest.fixture
def control(own_broker):
    """Run commands on the broker. The policies that they set are removed after the test."""
    yield lambda commands: asyncio.to_thread(run_as_operator, commands, own_broker)
    every_policy = "rabbitmqctl -q list_policies --no-table-headers | cut -f2"
    run_as_operator(f"for name in $({every_policy}); do rabbitmqctl clear_policy $name; done", own_broker)


def theirs(**definition: str | int) -> str:
    return f"rabbitmqctl set_policy theirs '.*' '{json.dumps(definition)}'"


async def test_dead_letters_that_a_full_queue_refuses_stay_until_there_is_room_and_delay_no_other_message(
    calculation_consumer, channel, database, stored_request, control, logs
):
    good = f'{{"request_uuid": "{stored_request.uuid}", "calculation_id": "C-1"}}'.encode()
    for message_id in IDS:
        await publish(channel, QUEUE, b"bad", message_id=message_id)
    await publish(channel, QUEUE, good)
    await control(theirs(**{"max-length": 3}))
    dead_letters, buried = await channel.get_queue(QUEUE.dead_letters), set[str | None]()

    async def all_are_buried() -> bool:
        buried.update(await take_ids(dead_letters))  # which makes room
        return buried == set(IDS)

    async with running(calculation_consumer.run):
        await eventually(lambda: database.fetchval("SELECT max(calculation_id) FROM calculation_request"))
        await eventually(lambda: "the dead-letter queue is full" in str(logs))
        await eventually(all_are_buried)

    assert "message_failed" not in str(logs)  # so no delivery was counted


async def test_policy_on_the_page_keeps_the_policies_of_other_teams_off_our_queues(channel, control):
    (ours,) = (block for block in code_blocks(INSTALLATION, "Users", "sh") if "set_policy" in block)
    times = {"message-ttl": 1, "expires": 1}  # in milliseconds
    lengths: dict[str, Any] = {"max-length": 3, "overflow": "drop-head", "delivery-limit": 0}
    await control(f"{ours}\n{theirs(**lengths, **times)}")

    for message_id in IDS:
        await publish(channel, QUEUE, b"living", message_id=message_id)
        await bury(channel, QUEUE, b"dead", message_id=message_id)

    for name in (QUEUE.name, QUEUE.dead_letters):
        queue = await channel.get_queue(name)
        for _ in range(3):
            await (await eventually(partial(queue.get, fail=False))).reject(requeue=True)
        await eventually(partial(holds, channel, name, len(IDS)))
        assert set(await take_ids(queue)) == set(IDS)
