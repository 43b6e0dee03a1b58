"""RabbitMQ's HTTP API does what the runbook's commands on a node do."""

import asyncio

import httpx
import pytest
from aio_pika import Message
from yarl import URL

from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import trouble_of_rabbitmq
from tests.deploy.pages import RUNBOOK, rows
from tests.harness.queues import count, declare_topology, open_channel
from tests.harness.servers import KillableBroker, enable_plugin
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

CALLS = {
    command.strip("`").split()[1]: call.strip("`").split()
    for command, call in rows(RUNBOOK, "Your own servers", "on a node")
}
QUEUE = topology.NOTIFICATIONS


@pytest.mark.long
async def test_http_api_does_what_the_commands_on_a_node_do(place):
    with rabbitmq_node(place) as server:  # a node of its own, because the plugin stays enabled
        port = await asyncio.to_thread(enable_plugin, "rabbitmq_management", server)
        broker, user = KillableBroker(server, trouble_of_rabbitmq), URL(server.url)
        async with (
            open_channel(server.url) as channel,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", auth=(user.user or "", user.password or "")
            ) as client,
        ):
            await declare_topology(channel)
            await channel.default_exchange.publish(Message(b"dead"), QUEUE.dead_letters)

            async def called(command: str) -> httpx.Response:
                method, path = CALLS[command]
                # httpx would decode %2F in a string.
                return await client.request(method, path.replace("QUEUE", QUEUE.name))

            async def lists_the_dead_letter() -> bool:
                listed = {one["name"]: one for one in (await called("list_queues")).json()}
                return bool(listed[QUEUE.dead_letters].get("messages"))

            await eventually(lists_the_dead_letter)
            bindings = [tuple(one.values()) for one in (await called("list_bindings")).json()]
            assert any({QUEUE.exchange, QUEUE.name, QUEUE.routing_key} == {*one} for one in bindings)
            assert (await called("list_policies")).json() == []
            members = (await called("quorum_status")).json()
            assert len(members["members"]) == len(members["online"]) == 1

            assert (await called("purge_queue")).is_success
            assert await count(channel, QUEUE.dead_letters) == 0

            assert (await called("alarms")).status_code == httpx.codes.OK
            await broker.raise_memory_alarm()
            assert (await called("alarms")).status_code == httpx.codes.SERVICE_UNAVAILABLE
