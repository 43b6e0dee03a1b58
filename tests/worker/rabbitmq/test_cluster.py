"""Nodes of a real cluster fail: a queue of another team loses its majority, a consumer its node."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from aio_pika import Message

from deploy.local.machine.folders import Place
from tests.deploy.manifests import of_kind
from tests.harness.in_process import running
from tests.harness.queues import declare_topology, open_channel
from tests.harness.rabbitmq_cluster import Cluster, skip_without_programs, three_nodes
from tests.harness.servers import scratch_folder
from tests.harness.waiting import eventually
from tests.worker.conftest import passes, settings_with, store, take_ids
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS
from worker.relay.loop import Relay

pytestmark = pytest.mark.long

_BEFORE, _DURING = 2, 20  # requests


@pytest.fixture(scope="module")
def cluster():
    skip_without_programs()
    with scratch_folder() as folder, three_nodes(Place(folder=folder)) as nodes:
        yield nodes


async def test_message_of_a_consumer_on_a_failed_node_is_soon_delivered_to_another(cluster):
    queue = topology.NOTIFICATIONS.name
    (policy,) = (manifest["spec"] for manifest in of_kind("production", "Policy").values())
    rule = f"'{policy['pattern']}' '{json.dumps(policy['definition'])}'"
    first, _, third = cluster.nodes
    if not (await first.control("rabbitmqctl version")).startswith("3."):  # 3.10 refuses it, and needs none.
        await first.control(f"rabbitmqctl set_policy --apply-to queues ours {rule}")
    async with open_channel(first.url) as channel:
        await declare_topology(channel)
        await channel.default_exchange.publish(Message(b"1"), queue)
        async with AsyncExitStack() as lost:
            with suppress(*BROKER_ERRORS):
                theirs = await lost.enter_async_context(open_channel(third.url))
                await (await theirs.get_queue(queue)).get(no_ack=False)
                await third.kill()
        began = time.monotonic()
        async with (await channel.get_queue(queue)).iterator(timeout=120) as messages:
            again = await anext(messages)
            waited = time.monotonic() - began
            await again.ack()
    await third.start()

    assert (again.body, again.redelivered) == (b"1", True)
    assert waited < 30  # seconds, of which the policy leaves the failed node's consumers ten


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
        async with open_channel(cluster.nodes[2].url) as channel:
            # It has replicas on this node, its leader, and on one other node.
            arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 2}
            arguments["x-queue-leader-locator"] = "client-local"
            theirs = await channel.declare_queue("of-another-team", durable=True, arguments=arguments)
            await theirs.bind(topology.REQUESTS, "#")
        for _ in range(_BEFORE):
            await store(database)
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))
        await cluster.nodes[2].kill()
        for _ in range(_DURING):
            await store(database)

        ids, errors = set[str | None](), set[str]()
        await eventually(lambda: all_notified(cluster, ids), seconds=60.0)

        async def is_held_back() -> bool:
            """Whether an event is held as not confirmed. RabbitMQ may have refused it first."""
            held = await database.fetch("SELECT last_error FROM outbox WHERE next_attempt_at IS NOT NULL")
            errors.update(row["last_error"].partition(":")[0] for row in held)
            return "not confirmed" in errors

        await eventually(is_held_back)
        async with open_channel(cluster.nodes[0].url) as channel:
            theirs = await channel.get_queue("of-another-team", ensure=False)
            await theirs.unbind(topology.REQUESTS, "#")
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))

    assert errors <= {"not confirmed", "refused by the broker"}
