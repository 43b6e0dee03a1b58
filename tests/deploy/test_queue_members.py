"""RabbitMQ exports the members of our queues as the alert on them expects it."""

import asyncio
import re

import httpx
import pytest

from deploy.local.servers.rabbitmq_node import rabbitmq_node
from tests.deploy.alerts import Case, see
from tests.deploy.pages import INSTALLATION
from tests.harness.queues import declare_topology, open_channel
from tests.harness.servers import enable_plugin
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

NAMES = [name for queue in topology.QUEUES for name in (queue.name, queue.dead_letters)]


@pytest.mark.long
async def test_alert_counts_the_nodes_that_hold_each_of_our_queues(place, tmp_path):
    with rabbitmq_node(place) as broker:  # a node of its own, because the plugin stays enabled
        port = await asyncio.to_thread(enable_plugin, "rabbitmq_prometheus", broker)
        async with open_channel(broker.url) as channel:
            await declare_topology(channel)
        of_a_node = await eventually(lambda: exported_by(port))

    cases = []
    for nodes, fires in ((2, [{"vhost": "/", "queue": name} for name in NAMES]), (3, [])):
        of_all = [f'{one.rstrip("}")},instance="{node}"}}' for one in of_a_node for node in range(nodes)]
        series = dict.fromkeys(of_all, "1x400")
        cases.append(Case(story=f"{nodes} nodes", series=series, at=91, fires=fires))
    await asyncio.to_thread(see, {"QueueMemberMissing": cases}, tmp_path)


async def exported_by(port: int) -> list[str]:
    """Return the series of our queues, read as the page says, once the messages of each queue are counted."""
    (path,) = set(re.findall(r"`(/metrics/detailed\?[^`]+)`", INSTALLATION.read_text()))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        text = (await client.get(path)).text
    series = [line.rpartition(" ")[0] for line in text.splitlines() if line.startswith("rabbitmq_detailed_")]
    counted = {f'rabbitmq_detailed_queue_messages{{vhost="/",queue="{name}"}}' for name in NAMES}
    return series if counted <= {*series} else []
