"""RabbitMQ exports the members of our queues as the alert on them expects it."""

import asyncio
import re

import httpx
import pytest

from deploy.local.machine.folders import Place
from deploy.local.machine.ports import free_port
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from tests.deploy.alerts import Case, see
from tests.deploy.pages import INSTALLATION
from tests.harness.queues import declare_topology, open_channel
from tests.harness.servers import run_as_operator
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

# The address is set first: otherwise the plugin listens on every interface, always on the same port.
EXPORT = """
rabbitmqctl eval 'application:set_env(rabbitmq_prometheus, tcp_config, [{ip, "127.0.0.1"}, {port, PORT}]).'
rabbitmq-plugins enable rabbitmq_prometheus
"""


@pytest.fixture
def broker(tmp_path):
    """A node of its own, because the plugin stays enabled."""
    with rabbitmq_node(Place(folder=tmp_path, keep=False, report=print)) as server:
        yield server


@pytest.mark.long
async def test_alert_counts_the_nodes_that_hold_each_of_our_queues(broker, tmp_path):
    port = free_port()
    await asyncio.to_thread(run_as_operator, EXPORT.replace("PORT", str(port)), broker)
    async with open_channel(broker.url) as channel:
        await declare_topology(channel)
    of_a_node = await eventually(lambda: exported_by(port))

    cases = [case(of_a_node, nodes=2, fires=True), case(of_a_node, nodes=3, fires=False)]
    await asyncio.to_thread(see, {"QueueMemberMissing": cases}, tmp_path)


async def exported_by(port: int) -> list[str]:
    """Return the series of our queues, read as the page says, once there are some of each queue."""
    (path,) = set(re.findall(r"`(/metrics/detailed\?[^`]+)`", INSTALLATION.read_text()))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        text = (await client.get(path)).text
    series = [line.rpartition(" ")[0] for line in text.splitlines() if line.startswith("rabbitmq_detailed_")]
    return series if all(any(f'queue="{name}"' in one for one in series) for name in names()) else []


def names() -> list[str]:
    return [name for queue in topology.QUEUES for name in (queue.name, queue.dead_letters)]


def case(exported: list[str], *, nodes: int, fires: bool) -> Case:
    """Return a case with *nodes* that all export the same."""
    series = {f'{one.rstrip("}")},instance="{node}"}}': "1x400" for one in exported for node in range(nodes)}
    firing = [{"queue": name} for name in names() if fires]
    return Case(story=f"{nodes} nodes", series=series, at="91m", fires=firing)
