"""The topology in the manifests is the one that the worker declares; what a node of RabbitMQ tells of it."""

import asyncio
import os
import re

import httpx
import pytest
from aio_pika import ExchangeType, Message
from aiormq.exceptions import ChannelPreconditionFailed
from yarl import URL

from deploy.local.machine.folders import CHECKOUT, Place
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import trouble_of_rabbitmq
from tests.deploy.alerts import Case, see
from tests.deploy.manifests import Manifest, container_of, of_kind, workloads
from tests.deploy.pages import INSTALLATION, RUNBOOK, rows
from tests.harness.queues import count, declare_topology, open_channel
from tests.harness.servers import KillableBroker, enable_plugin
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

QUEUE = topology.NOTIFICATIONS
NAMES = {name for queue in topology.QUEUES for name in (queue.name, queue.dead_letters)}


def specifications(kind: str) -> list[Manifest]:
    return [manifest["spec"] for manifest in of_kind("production", kind).values()]


async def test_broker_lets_the_worker_declare_over_what_the_operator_has_declared(channel):
    """A broker refuses a second declaration with any other argument."""
    for exchange in specifications("Exchange"):
        name, type_ = exchange["name"], ExchangeType(exchange["type"])
        await channel.exchange_delete(name)
        await channel.declare_exchange(name, type_, durable=exchange["durable"])
    for queue in specifications("Queue"):
        await channel.queue_delete(queue["name"])
        arguments = {"x-queue-type": queue["type"], **queue["arguments"]}
        await channel.declare_queue(queue["name"], durable=queue["durable"], arguments=arguments)

    await declare_topology(channel)


def test_manifests_name_what_the_worker_declares_and_their_policy_changes_none_of_its_arguments():
    queues, (policy,) = specifications("Queue"), specifications("Policy")
    bindings = {(one["source"], one["destination"], one["routingKey"]) for one in specifications("Binding")}

    assert {queue["name"] for queue in queues} == NAMES
    assert {exchange["name"] for exchange in specifications("Exchange")} == topology.EXCHANGES.keys()
    assert bindings == {
        *((queue.exchange, queue.name, queue.routing_key) for queue in topology.QUEUES),
        *((queue.bypass, queue.name, queue.routing_key) for queue in topology.QUEUES if queue.bypass),
        *((topology.DEAD_LETTERS, queue.dead_letters, queue.dead_letters) for queue in topology.QUEUES),
    }
    assert all(re.search(policy["pattern"], name) for name in NAMES)
    assert not re.search(policy["pattern"], "notifications-of-another-team")
    arguments = {name for queue in queues for name in queue["arguments"]}
    assert not {f"x-{name}" for name in policy["definition"]} & arguments
    assert policy["priority"] > 0  # the default, and so that of other teams' policies


def test_every_broker_of_ours_refuses_messages_that_would_fill_a_workers_memory():
    (cluster,), limit = specifications("RabbitmqCluster"), "-rabbit max_message_size 131072"
    variable = {"name": "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "value": limit}

    assert "max_message_size = 131072\n" in cluster["rabbitmq"]["additionalConfig"]
    assert variable in container_of(workloads("dev")["rabbitmq"])["env"]
    assert limit in (CHECKOUT / "deploy" / "compose.yaml").read_text()


@pytest.mark.skipif("AMQP_URL" in os.environ, reason="only brokers of ours have the limit")
async def test_broker_of_the_tests_refuses_a_message_that_would_fill_a_workers_memory(channel):
    await channel.default_exchange.publish(Message(bytes(131_072)), QUEUE.name)

    with pytest.raises(ChannelPreconditionFailed, match="larger than configured max size"):
        await channel.default_exchange.publish(Message(bytes(131_073)), QUEUE.name)


@pytest.mark.long
async def test_http_api_does_what_the_commands_on_a_node_do_and_the_alert_counts_the_nodes_of_each_queue(
    tmp_path,
):
    calls = {
        command.strip("`").split()[1]: call.strip("`").split()
        for command, call in rows(RUNBOOK, "Your own servers", "on a node")
    }
    # A node of its own, because the plugins stay enabled.
    with rabbitmq_node(Place(folder=tmp_path / "server")) as server:
        broker, user = KillableBroker(server, trouble_of_rabbitmq), URL(server.url)
        ports = [
            await asyncio.to_thread(enable_plugin, f"rabbitmq_{name}", server)
            for name in ("management", "prometheus")
        ]
        login = (user.user or "", user.password or "")
        api, exporter = (httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", auth=login) for port in ports)

        async def called(command: str) -> httpx.Response:
            method, path = calls[command]
            # httpx would decode %2F in a string.
            return await api.request(method, path.replace("QUEUE", QUEUE.name))

        async def lists_the_dead_letter() -> bool:
            listed = {one["name"]: one for one in (await called("list_queues")).json()}
            return bool(listed[QUEUE.dead_letters].get("messages"))

        async with open_channel(server.url) as channel, api, exporter:
            await declare_topology(channel)
            await channel.default_exchange.publish(Message(b"dead"), QUEUE.dead_letters)
            await eventually(lists_the_dead_letter)
            bindings = [tuple(one.values()) for one in (await called("list_bindings")).json()]
            assert any({QUEUE.exchange, QUEUE.name, QUEUE.routing_key} == {*one} for one in bindings)
            assert (await called("list_policies")).json() == []
            members = (await called("quorum_status")).json()
            assert len(members["members"]) == len(members["online"]) == 1

            assert (await called("purge_queue")).is_success
            assert await count(channel, QUEUE.dead_letters) == 0

            of_a_node = await eventually(lambda: exported_by(exporter))
            cases = [of_nodes(2, of_a_node, [{"queue": name} for name in NAMES]), of_nodes(3, of_a_node, [])]
            await asyncio.to_thread(see, {"QueueMemberMissing": cases}, tmp_path)

            assert (await called("alarms")).status_code == httpx.codes.OK
            await broker.raise_memory_alarm()
            assert (await called("alarms")).status_code == httpx.codes.SERVICE_UNAVAILABLE


async def exported_by(client: httpx.AsyncClient) -> list[str]:
    """Return the series of our queues, read as the page says, once the messages of each queue are counted."""
    (path,) = set(re.findall(r"`(/metrics/detailed\?[^`]+)`", INSTALLATION.read_text()))
    series = re.findall(r"^(rabbitmq_detailed_.*) ", (await client.get(path)).text, re.MULTILINE)
    counted = {f'rabbitmq_detailed_queue_messages{{vhost="/",queue="{name}"}}' for name in NAMES}
    return series if counted <= {*series} else []


def of_nodes(count: int, of_a_node: list[str], fires: list[dict[str, str]]) -> Case:
    series = [f'{one.rstrip("}")},instance="{node}"}}' for one in of_a_node for node in range(count)]
    return Case(f"{count} nodes", dict.fromkeys(series, "1x400"), 91, fires)
