"""Faults of a RabbitMQ cluster: of one node, of all in turn, of one and the Postgres primary at once."""

import asyncio
from functools import partial

from tests.faults.catalogue.fault import CLUSTER_FAULTS, fault
from tests.faults.world import World
from tests.harness.rabbitmq_cluster import Node
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BLOCKED

_of_cluster = partial(fault, repeats=True, among=CLUSTER_FAULTS)


@_of_cluster("leader killed", "cluster")
async def kill_leader(world: World) -> bool:
    """SIGKILL to the leader of our queue. What the relays sent it in its last second is lost with it."""
    leader = await _connect_relays_to_leader(world)
    leader.freeze()
    await asyncio.sleep(1.0)
    await leader.kill()
    await asyncio.sleep(5.0)
    is_down = not leader.is_up
    await leader.start()
    return is_down


@_of_cluster("majority killed", "cluster")
async def kill_majority(world: World) -> bool:
    """SIGKILL to two nodes at once. The third then closes its connections."""
    victims = world.chance.sample(world.cluster.nodes.nodes, k=2)
    await asyncio.gather(*(node.kill() for node in victims))
    await world.is_named(world.of_role("relay")[0], "RabbitMQ at AMQP_URL is", "wrong    rabbitmq")
    are_down = not any(node.is_up for node in victims)
    await asyncio.gather(*(node.start() for node in victims))
    return are_down


@_of_cluster("leader frozen", "cluster")
async def freeze_leader(world: World) -> bool:
    """SIGSTOP to the leader of our queue. Its connections stay open, and it accepts new ones."""
    leader = await _connect_relays_to_leader(world)
    leader.freeze()
    try:
        await asyncio.sleep(30.0)
        return not await leader.answers()
    finally:
        leader.thaw()


@_of_cluster("leader cut off", "cluster")
async def cut_leader_off(world: World) -> bool:
    """The leader of our queue, to which the relays are connected, loses the two other nodes."""
    leader = await _connect_relays_to_leader(world)
    others = world.cluster.nodes.others(leader)
    await leader.cut_off(others)
    try:
        await asyncio.sleep(60.0)
        return not leader.is_up
    finally:
        await leader.rejoin(others)


@_of_cluster("nodes restarted", "cluster")
async def restart_nodes(world: World) -> bool:
    """SIGTERM to each node, one after the other, as a rolling update does."""
    nodes = world.cluster.nodes.nodes
    before = {node.process.pid for node in nodes}
    for node in nodes:
        await node.restart()
    return before.isdisjoint(node.process.pid for node in nodes)


@_of_cluster("disk alarm", "cluster")
async def alarm_one_node(world: World) -> bool:
    """One node has too little disk space: then every node blocks the connections that publish."""
    node = world.chance.choice(world.cluster.nodes.nodes)
    await node.raise_disk_alarm()
    try:
        return await world.is_named(world.of_role("relay")[0], BLOCKED, BLOCKED)
    finally:
        await node.clear_disk_alarm()


@_of_cluster("node and primary killed", "cluster")
async def kill_node_and_primary(world: World) -> bool:
    """SIGKILL to the leader of our queue and to Postgres. Then the standby is promoted: once in a run."""
    servers = world.cluster
    leader = await servers.nodes.leader(topology.NOTIFICATIONS.name)
    await asyncio.gather(leader.kill(), servers.pair.primary.kill())
    await world.is_named(world.of_role("api")[0], "Postgres is unreachable", "wrong    postgres")
    are_down = not (leader.is_up or servers.pair.primary.is_up)
    await servers.pair.promote()
    servers.to_postgres.lead_to(servers.pair.standby_url)
    await leader.start()
    return are_down


async def _connect_relays_to_leader(world: World) -> Node:
    """Let the relays connect to the leader of our queue, and later to any node. Returns the leader."""
    leader = await world.cluster.nodes.leader(topology.NOTIFICATIONS.name)
    relays = world.of_role("relay")
    for relay in relays:
        relay.broker.lead_to(leader.url, world.servers.broker_url)
        await relay.broker.cut()
    await asyncio.gather(*(relay.may_become_ready() for relay in relays))
    return leader
