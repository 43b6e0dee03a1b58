"""A node of a real cluster fails: a queue of another team loses its majority."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from deploy.local.machine.folders import Place
from tests.harness import scratch
from tests.harness.in_process import running
from tests.harness.queues import open_channel
from tests.harness.rabbitmq_cluster import Cluster, skip_without_programs, three_nodes
from tests.harness.waiting import eventually
from tests.worker.conftest import passes, settings_with, store, take_ids
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS
from worker.relay.loop import Relay

pytestmark = pytest.mark.long

_BEFORE, _DURING = 2, 20  # requests
_EMAIL_SECONDS = 60.0  # until the last event is in our queue


@pytest.fixture(scope="module")
def cluster():
    skip_without_programs()
    with scratch.folder() as folder, three_nodes(Place(folder=folder)) as nodes:
        yield nodes


async def bind_queue_of_two_nodes(cluster: Cluster) -> None:
    """Bind a queue with replicas on the third node, its leader, and on one other node."""
    async with open_channel(cluster.nodes[2].url) as channel:
        arguments: dict[str, Any] = {
            "x-queue-type": "quorum",
            "x-quorum-initial-group-size": 2,
            "x-queue-leader-locator": "client-local",
        }
        queue = await channel.declare_queue("of-another-team", durable=True, arguments=arguments)
        await queue.bind(topology.REQUESTS, "#")


async def unbind(cluster: Cluster) -> None:
    async with open_channel(cluster.nodes[0].url) as channel:
        queue = await channel.get_queue("of-another-team", ensure=False)
        await queue.unbind(topology.REQUESTS, "#")


async def all_notified(cluster: Cluster, ids: set[str | None]) -> bool:
    """Take what our queue holds. Whether it got the event of every request."""
    with suppress(*BROKER_ERRORS):
        async with open_channel(cluster.nodes[0].url) as channel:
            ids.update(await take_ids(await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)))
    return len(ids) == _BEFORE + _DURING


async def test_emails_go_out_while_a_queue_of_another_team_has_no_majority(
    worker_settings, pool, database, cluster
):
    settings = settings_with(worker_settings, amqp_url=cluster.nodes[0].url)
    relay = Relay(settings, pool, asyncio.Event())
    async with running(relay.run):
        await eventually(lambda: passes(relay.check))
        await bind_queue_of_two_nodes(cluster)
        for _ in range(_BEFORE):
            await store(database)
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))
        await cluster.nodes[2].kill()
        for _ in range(_DURING):
            await store(database)

        ids = set[str | None]()
        await eventually(lambda: all_notified(cluster, ids), seconds=_EMAIL_SECONDS)

        async def is_held_back() -> bool:
            """Whether an event is held as not confirmed. RabbitMQ may have refused it first."""
            for row in await database.fetch(
                "SELECT last_error FROM outbox WHERE next_attempt_at IS NOT NULL"
            ):
                errors.add(row["last_error"].partition(":")[0])
            return "not confirmed" in errors

        errors = set[str]()
        await eventually(is_held_back)

        await unbind(cluster)
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))

    assert errors <= {"not confirmed", "refused by the broker"}
