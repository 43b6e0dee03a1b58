"""The messaging topology in the manifests is the one that the worker declares."""

import os
import re

import pytest
from aio_pika import ExchangeType, Message
from aiormq.exceptions import ChannelPreconditionFailed

from deploy.local.machine.folders import CHECKOUT
from tests.deploy.manifests import Manifest, container_of, of_kind, workloads
from tests.harness.queues import declare_topology
from worker.rabbitmq import topology


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


def test_manifests_name_what_the_worker_declares_and_no_more():
    names = {name for queue in topology.QUEUES for name in (queue.name, queue.dead_letters)}
    bindings = {(one["source"], one["destination"], one["routingKey"]) for one in specifications("Binding")}

    assert {queue["name"] for queue in specifications("Queue")} == names
    assert {exchange["name"] for exchange in specifications("Exchange")} == topology.EXCHANGES.keys()
    assert bindings == {
        *((queue.exchange, queue.name, queue.routing_key) for queue in topology.QUEUES),
        *((queue.bypass, queue.name, queue.routing_key) for queue in topology.QUEUES if queue.bypass),
        *((topology.DEAD_LETTERS, queue.dead_letters, queue.dead_letters) for queue in topology.QUEUES),
    }


def test_policy_applies_to_the_workers_queues_and_changes_none_of_their_arguments():
    (policy,) = specifications("Policy")
    arguments = {name for queue in specifications("Queue") for name in queue["arguments"]}

    assert all(re.search(policy["pattern"], queue["name"]) for queue in specifications("Queue"))
    assert not re.search(policy["pattern"], "notifications-of-another-team")
    assert not {f"x-{name}" for name in policy["definition"]} & arguments
    assert policy["priority"] > 0  # the default, and so that of other teams' policies


def test_every_broker_of_ours_refuses_messages_that_would_fill_a_workers_memory():
    (cluster,) = specifications("RabbitmqCluster")
    limit = "-rabbit max_message_size 131072"

    assert "max_message_size = 131072\n" in cluster["rabbitmq"]["additionalConfig"]
    variable = {"name": "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "value": limit}
    assert variable in container_of(workloads("dev")["rabbitmq"])["env"]
    assert limit in (CHECKOUT / "deploy" / "compose.yaml").read_text()


@pytest.mark.skipif("AMQP_URL" in os.environ, reason="only brokers of ours have the limit")
async def test_broker_of_the_tests_refuses_a_message_that_would_fill_a_workers_memory(channel):
    await channel.default_exchange.publish(Message(bytes(131_072)), topology.NOTIFICATIONS.name)

    with pytest.raises(ChannelPreconditionFailed, match="larger than configured max size"):
        await channel.default_exchange.publish(Message(bytes(131_073)), topology.NOTIFICATIONS.name)
