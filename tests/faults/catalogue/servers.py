"""Faults of the servers: Postgres, RabbitMQ, the mail server; and of a cluster of RabbitMQ's nodes."""

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

from aio_pika import Message

from deploy.local.machine.ports import accepts
from service.postgres.pool import Connection
from tests.faults import others
from tests.faults.catalogue.processes import each
from tests.faults.records import Event, Span
from tests.faults.world import CLUSTER_FAULTS, HARNESS, World, fault
from tests.harness import databases, queues
from tests.harness.rabbitmq_cluster import Node
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import until
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BLOCKED


@fault("backends terminated", "backends", "postgres", repeats=True)
async def terminate_backends(world: World) -> bool:
    terminated = 0
    end = time.monotonic() + world.chance.uniform(1.5, 4.0)
    while time.monotonic() < end:
        terminated += await world.on_postgres(partial(_terminate_some, world.chance.uniform(0.1, 0.6)))
        await asyncio.sleep(0.5)
    return terminated > 0


async def _terminate_some(share: float, connection: Connection) -> int:
    ended = await connection.fetch(
        """
        SELECT pg_terminate_backend(pid)
          FROM pg_stat_activity
         WHERE backend_type = 'client backend'
           AND application_name <> $1
           AND random() < $2
        """,
        HARNESS,
        share,
    )
    return len(ended)


async def _kill(name: str, world: World) -> bool:
    server = world.servers.postgres if name == "Postgres" else world.servers.broker
    await server.kill()
    await asyncio.sleep(world.some_seconds(1.5))
    is_down = not server.is_up
    await server.start()
    return is_down


fault("Postgres killed", "postgres", "backends", repeats=True)(partial(_kill, "Postgres"))
fault("RabbitMQ killed", "broker", "broker links", repeats=True)(partial(_kill, "RabbitMQ"))


async def _make_read_only(whose: str, world: World) -> bool:
    """Let no session write for a while. All stay open, unless the server is demoted.

    Then all are cut, and those opened during the fault can never write, only later ones can. So it is behind
    a proxy to the primary: that becomes a standby, and later the proxy leads to the new primary.
    """
    await world.on_postgres(partial(_alter, f"ALTER {whose} SET default_transaction_read_only = on"))
    if whose == "ROLE ALL":
        await world.on_postgres(partial(_terminate_some, 1.0))
    began = time.monotonic()
    try:
        await asyncio.sleep(2.0 + world.some_seconds(5.0))
        async with databases.connected(world.servers.postgres_url) as connection:
            return await connection.fetchval("SHOW default_transaction_read_only") == "on"
    finally:
        world.record.read_only.append(Span("", began, time.monotonic()))
        await world.on_postgres(partial(_alter, f"ALTER {whose} RESET default_transaction_read_only"))


async def _alter(statement: str, connection: Connection) -> None:
    await connection.execute(statement)
    await connection.execute("SELECT pg_reload_conf()")


for _name, _whose in (("read-only", "SYSTEM"), ("demoted", "ROLE ALL")):
    _touched = ("postgres", "backends", "postgres links")
    fault(f"Postgres {_name}", *_touched, repeats=True)(partial(_make_read_only, _whose))


async def _lock_table(table: str, world: World) -> bool:
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = $1::regclass"

    async def hold(connection: Connection) -> bool:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            is_waited_for = until(lambda: connection.fetchval(waits, table), seconds=4.0)
            _, is_seen = await asyncio.gather(asyncio.sleep(4.0), is_waited_for)
            return is_seen

    return await world.on_postgres(hold)


for _table in ("calculation_request", "outbox", "email"):
    fault(f"{_table} locked", "postgres", "backends")(partial(_lock_table, _table))


@fault("memory alarm", "broker", repeats=True)
async def alarm_broker(world: World) -> bool:
    """RabbitMQ blocks the connections that publish: it confirms nothing after the first message."""
    await world.servers.broker.raise_memory_alarm()
    try:
        await asyncio.sleep(world.stall_seconds())
        async with queues.open_channel(world.servers.broker_url) as channel:
            publish = partial(channel.default_exchange.publish, Message(b""), "nowhere", mandatory=False)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(publish(), publish()), 1.0)
                return False
            return True
    finally:
        await world.servers.broker.clear_memory_alarm()


@fault("messages returned", "broker", "broker links", repeats=True)
async def return_messages(world: World) -> bool:
    """No queue is bound to request.created, so mandatory messages are returned.

    A process declares the bindings when it connects and each minute after that. So all connect again, and
    two seconds later new connections are refused. The product's queue is bound twice, to its exchange and
    to the harness's switch; the switch takes the events from all other queues at once.
    """
    links = world.broker_links
    await asyncio.gather(*(link.cut() for link in links))
    await until(
        lambda: all(link.open_connections and link.youngest_seconds >= 2.0 for link in links), seconds=30.0
    )
    async with (
        each(links, TcpProxy.stop_listening, TcpProxy.start),
        queues.open_channel(world.servers.broker_url) as channel,
    ):
        notifications = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
        switch = await channel.get_exchange(others.SWITCH, ensure=False)
        await notifications.unbind(topology.REQUESTS, Event.CREATED)
        await switch.unbind(topology.REQUESTS, Event.CREATED)
        try:
            began = time.monotonic() + 0.1  # for those on the way
            await asyncio.sleep(world.some_seconds(2.5))
            latest = world.record.arrivals[-100:]
            return not any(event.type == Event.CREATED and event.at > began for event in latest)
        finally:
            await switch.bind(topology.REQUESTS, Event.CREATED)
            await notifications.bind(topology.REQUESTS, Event.CREATED)


@fault("messages refused", "broker", "broker links", repeats=True)
async def refuse_messages(world: World) -> bool:
    """Another team's full queue refuses every event, while all other queues accept it."""
    limits: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    async with queues.open_channel(world.servers.broker_url) as channel:
        full = await channel.declare_queue("harness.full", durable=True, arguments=limits)
        try:
            await full.bind(topology.REQUESTS, "request.*")
            began = time.monotonic()
            await asyncio.sleep(world.chance.uniform(1.0, world.record.plan.longest_stall + 4.0))
            world.record.refusals.append(Span("", began, time.monotonic()))
            is_full = await queues.holds(channel, full.name, 1)
            if world.chance.random() < 0.5:  # Its team consumes again, before the queue is deleted.
                await full.consume(lambda _: asyncio.sleep(0), no_ack=True)
                await asyncio.sleep(world.some_seconds(1.0))
            return is_full
        finally:
            await full.delete(if_unused=False, if_empty=False)


@fault("mail refused for now", "mail")
async def refuse_mail(world: World) -> bool:
    before = world.mail.commands["RCPT"]
    with world.mail.refusing():
        await asyncio.sleep(world.some_seconds())
    return world.mail.commands["RCPT"] > before


@fault("sender refused", "mail", "notifications")
async def refuse_sender(world: World) -> bool:
    """Every MAIL gets a 4xx, for long enough to see whether the connections are closed."""
    before, still_open = world.mail.commands["MAIL"], set()
    with patch.dict(world.mail.replies, {"MAIL": b"452 4.3.1 insufficient storage"}):
        await asyncio.sleep(2.0 + world.some_seconds())
        for _ in range(20):  # The least of a second: some may be being opened or closed at any moment.
            still_open.add(world.mail.open_connections)
            await asyncio.sleep(0.05)
    world.record.peaks["mail connections"].append(min(still_open))
    return world.mail.commands["MAIL"] > before


@fault("mail server quotes the link", "mail")
async def quote_link(world: World) -> bool:
    """Every reply to a content contains the customer's link."""
    before = len(world.mail.quoted)
    with patch.object(world.mail, "quotes", new=True):
        await asyncio.sleep(1.0 + world.some_seconds())
    return len(world.mail.quoted) > before


@fault("mail server slow during a SIGTERM", "mail", "notifications")
async def stop_amid_slow_acceptance(world: World) -> bool:
    """SIGTERM to a sender that waits for replies to contents, which the mail server has accepted."""
    sender = world.one_of("notifications")
    with world.mail.holding(sender.name, "content"):
        is_held = await until(lambda: world.mail.held, seconds=5.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(sender.restart())
            await asyncio.sleep(15.0)  # less than a process that was sent SIGTERM has for a reply
            world.mail.release()
    return is_held


@fault("mail server dies after acceptance", "mail")
async def lose_mail_replies(world: World) -> bool:
    """The connection breaks after the e-mail is accepted and before the reply is sent."""
    before = len(world.record.acceptances)
    with patch.object(world.mail, "death_rate", world.chance.uniform(0.2, 1.0)):
        await asyncio.sleep(world.some_seconds(2.0))
    return any(not acceptance.answered for acceptance in world.record.acceptances[before:])


@fault("mail server down", "mail")
async def stop_mail_server(world: World) -> bool:
    world.mail.stop()
    try:
        await asyncio.sleep(world.some_seconds())
        return not accepts(world.mail.port)
    finally:
        await world.mail.start()


@fault("mail server stalled", "mail")
async def stall_mail(world: World) -> bool:
    """No command gets a reply until the end; then all do."""
    with world.mail.holding():
        await asyncio.sleep(world.stall_seconds())
        return world.mail.held > 0


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
    await node.control("rabbitmqctl set_disk_free_limit 999999GB")
    try:
        return await world.is_named(world.of_role("relay")[0], BLOCKED, BLOCKED)
    finally:
        await node.control("rabbitmqctl set_disk_free_limit 50MB")


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
