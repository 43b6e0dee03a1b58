"""The faults: each a function that returns when the fault has ended. All choices are the world's chance."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aiormq.exceptions import ChannelNotFoundEntity

from service.identifiers import new_request_id, uuid_of
from service.outbox import writing
from service.outbox.events import CalculationCreated
from service.postgres import loans
from service.postgres.pool import Connection
from tests.faults import own_queues
from tests.faults.records import CREATED, Interval, Span
from tests.faults.world import HARNESS, World
from tests.harness import queues
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import until
from worker.rabbitmq import topology

_FULL = "harness.full"
_TOO_LONG_A_TYPE = "request." + "x" * 300  # a routing key holds 255 bytes
_EMPTY_SECONDS = 30.0
_KEEPALIVE_SECONDS = 30.0  # after which the network would tell Postgres; by default it takes two hours
_REPEATED_AT_ONCE = 10  # keys
_HELD_SECONDS = 5.0
_HELD_AT_ONCE = 3  # of the four that a process sends side by side
_FREEZING_SECONDS = 0.2  # from a SIGSTOP until nothing runs any more
_LOCKED_SECONDS = 4.0
_PASS_SECONDS = 2.0  # in which a batch that was under way is done
_RECONNECTED_SECONDS = 10.0
_SETTLED_SECONDS = 2.0  # a connection older than this has declared what it declares


class Fault(msgspec.Struct, frozen=True):
    """What is done, and what it lays its hands on: faults that touch the same do not come together."""

    name: str
    inject: Callable[[World], Awaitable[None]]
    touches: frozenset[str]
    repeats_events: bool  # it may come between a confirm and its settling

    async def happen(self, world: World) -> None:
        """Inject it and write down when."""
        began = time.monotonic()
        await self.inject(world)
        world.record.spans.append(Span(self.name, began, time.monotonic(), self.repeats_events))


FAULTS: list[Fault] = []


def _fault(
    name: str, *touches: str, repeats: bool
) -> Callable[[Callable[[World], Awaitable[None]]], Callable[[World], Awaitable[None]]]:
    def register(inject: Callable[[World], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
        FAULTS.append(Fault(name, inject, frozenset(touches), repeats))
        return inject

    return register


# Our processes


@_fault("relay killed", "relay", repeats=True)
async def kill_relays(world: World) -> None:
    """SIGKILL to one relay, at times to all."""
    await _kill(world, "relay")


@_fault("notifications killed", "notifications", repeats=False)
async def kill_notifications(world: World) -> None:
    """SIGKILL to one process that sends e-mails, at times to all."""
    await _kill(world, "notifications")


@_fault("calculations killed", "calculations", repeats=False)
async def kill_calculations(world: World) -> None:
    """SIGKILL to one process that records calculations, at times to all."""
    await _kill(world, "calculations")


@_fault("API killed", "api", repeats=False)
async def kill_api(world: World) -> None:
    """SIGKILL to one API, at times to both."""
    await _kill(world, "api")


@_fault("APIs killed amid repeats", "api", repeats=False)
async def kill_apis_amid_repeats(world: World) -> None:
    """SIGKILL to one API after the other, while creates come to both, several times each with its key."""
    async with asyncio.TaskGroup() as calling:
        for api in world.chance.sample(world.of_role("api"), k=2):
            for _ in range(_REPEATED_AT_ONCE):
                calling.create_task(world.callers.create())
            await asyncio.sleep(world.chance.uniform(0.0, 0.2))
            await api.kill()
            if world.chance.random() < 0.7:
                await api.becomes_ready()


async def _kill(world: World, role: str) -> None:
    victims = world.of_role(role)
    if world.chance.random() < 0.7:
        victims = [world.chance.choice(victims)]
    await asyncio.sleep(world.some_seconds(0.5))
    await asyncio.gather(*(victim.kill() for victim in victims))


@_fault("relay frozen", "relay", "postgres", "backends", "postgres links", repeats=True)
async def freeze_relay(world: World) -> None:
    """SIGSTOP to a relay for longer than Postgres lets it keep its lanes."""
    seconds = loans.SILENCE_SECONDS + world.chance.uniform(1.0, 3.0)
    await world.chance.choice(world.of_role("relay")).freeze(seconds)


@_fault(
    "notifications frozen",
    *("notifications", "mail", "postgres", "backends", "postgres links"),
    repeats=False,
)
async def freeze_notifications(world: World) -> None:
    """SIGSTOP to a sender for longer than its claims, with e-mails in hand that the mail server waits for.

    Their content has not been sent yet: what was has an answer that the others cannot know.
    """
    sender = world.chance.choice(world.of_role("notifications"))
    world.mail.hold(sender.name)
    try:
        await until(lambda: world.mail.held_sessions >= _HELD_AT_ONCE, seconds=_HELD_SECONDS)
        async with asyncio.TaskGroup() as group:
            seconds = world.record.email_claim_seconds + world.chance.uniform(3.0, 5.0)
            group.create_task(sender.freeze(seconds))
            await asyncio.sleep(_FREEZING_SECONDS)
            world.mail.release()
    finally:
        world.mail.release()


@_fault("rolling restart", "relay", "notifications", "calculations", "api", repeats=False)
async def restart_all(world: World) -> None:
    """SIGTERM to one process after the other, the next when the new one is ready."""
    for worker in world.chance.sample(world.workers, k=len(world.workers)):
        await worker.restart()
        if world.chance.random() < 0.5:
            await worker.becomes_ready()


# Postgres


@_fault("backends terminated", "backends", "postgres", repeats=True)
async def terminate_backends(world: World) -> None:
    """pg_terminate_backend of random backends, twice a second."""
    end = time.monotonic() + world.chance.uniform(1.5, 4.0)
    while time.monotonic() < end:
        await world.on_postgres(_terminate_some(world.chance.uniform(0.1, 0.6)))
        await asyncio.sleep(0.5)


def _terminate_some(share: float) -> Callable[[Connection], Awaitable[None]]:
    async def terminate(connection: Connection) -> None:
        await connection.execute(
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

    return terminate


@_fault("Postgres killed", "postgres", "backends", repeats=True)
async def kill_postgres(world: World) -> None:
    """SIGKILL to all processes of Postgres, and a start."""
    await world.servers.postgres.kill()
    await asyncio.sleep(world.some_seconds(1.5))
    await world.servers.postgres.start()


@_fault("Postgres read-only", "postgres", "backends", "postgres links", repeats=True)
async def make_postgres_read_only(world: World) -> None:
    """No session can write for a while, and all stay open."""
    await world.on_postgres(_all_read_only)
    began = time.monotonic()
    try:
        await asyncio.sleep(_PASS_SECONDS + world.some_seconds(5.0))
    finally:
        world.record.read_only.append(Interval(began, time.monotonic()))
        await world.on_postgres(_all_writable)


@_fault("Postgres demoted", "postgres", "backends", "postgres links", repeats=True)
async def demote_postgres(world: World) -> None:
    """Sessions are cut, those opened then can never write, and only later ones can.

    As behind a proxy that leads to a primary, which becomes a standby, and after a while to the new primary.
    """
    await world.on_postgres(_later_read_only)
    await world.on_postgres(_terminate_some(1.0))
    began = time.monotonic()
    try:
        await asyncio.sleep(_PASS_SECONDS + world.some_seconds(5.0))
    finally:
        world.record.read_only.append(Interval(began, time.monotonic()))
        await world.on_postgres(_later_writable)


async def _all_read_only(connection: Connection) -> None:
    await connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    await connection.execute("SELECT pg_reload_conf()")


async def _all_writable(connection: Connection) -> None:
    await connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
    await connection.execute("SELECT pg_reload_conf()")


async def _later_read_only(connection: Connection) -> None:
    await connection.execute("ALTER ROLE ALL SET default_transaction_read_only = on")


async def _later_writable(connection: Connection) -> None:
    await connection.execute("ALTER ROLE ALL RESET default_transaction_read_only")


async def _lock_table(world: World, *, table: str) -> None:
    async def hold(connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            await asyncio.sleep(_LOCKED_SECONDS)

    await world.on_postgres(hold)


for _table in ("calculation_request", "outbox", "email"):
    _fault(f"{_table} locked", "postgres", "backends", repeats=False)(partial(_lock_table, table=_table))


@_fault("Postgres connections cut", "postgres links", repeats=True)
async def cut_postgres(world: World) -> None:
    """RST to every connection of some processes, a few times."""
    await _cut_again_and_again(world, world.some_links(world.postgres_links))


@_fault("Postgres refuses", "postgres links", repeats=True)
async def refuse_postgres(world: World) -> None:
    """No way to Postgres for some processes."""
    await _refuse(world, world.some_links(world.postgres_links))


@_fault("Postgres connections stalled", "postgres links", repeats=True)
async def stall_postgres(world: World) -> None:
    """Silence between some processes and Postgres."""
    await _stall(world, world.some_links(world.postgres_links))


@_fault("Postgres connections half-open", "postgres links", repeats=True)
async def strand_postgres(world: World) -> None:
    """Connections that are open pass nothing any more; new ones are fine."""
    await _strand(world, world.some_links(world.postgres_links))


@_fault("Postgres clients vanished", "postgres links", repeats=True)
async def vanish_before_postgres(world: World) -> None:
    """Connections end for our processes, and Postgres is not told: as when a node loses its power."""
    for link in world.some_links(world.postgres_links):
        forget = link.vanish()
        asyncio.get_running_loop().call_later(_KEEPALIVE_SECONDS, forget)


@_fault("Postgres connections slowed", "postgres links", repeats=True)
async def slow_postgres(world: World) -> None:
    """Every packet between some processes and Postgres is late."""
    await _slow(world, world.some_links(world.postgres_links))


# RabbitMQ


@_fault("RabbitMQ killed", "broker", "broker links", repeats=True)
async def kill_broker(world: World) -> None:
    """SIGKILL to RabbitMQ, and a start."""
    await world.servers.broker.kill()
    await asyncio.sleep(world.some_seconds(1.0))
    await world.servers.broker.start()


@_fault("memory alarm", "broker", repeats=True)
async def alarm_broker(world: World) -> None:
    """RabbitMQ blocks who publishes."""
    await world.servers.broker.raise_memory_alarm()
    try:
        await asyncio.sleep(world.stall_seconds())
    finally:
        await world.servers.broker.clear_memory_alarm()


@_fault("AMQP connections cut", "broker links", repeats=True)
async def cut_broker(world: World) -> None:
    """RST to every connection of some processes, a few times."""
    await _cut_again_and_again(world, world.some_links(world.broker_links))


@_fault("RabbitMQ refuses", "broker links", repeats=True)
async def refuse_broker(world: World) -> None:
    """No way to RabbitMQ for some processes."""
    await _refuse(world, world.some_links(world.broker_links))


@_fault("AMQP connections stalled", "broker links", repeats=True)
async def stall_broker(world: World) -> None:
    """Silence between some processes and RabbitMQ."""
    await _stall(world, world.some_links(world.broker_links))


@_fault("AMQP connections half-open", "broker links", repeats=True)
async def strand_broker(world: World) -> None:
    """Connections that are open pass nothing any more; new ones are fine."""
    await _strand(world, world.some_links(world.broker_links))


@_fault("AMQP connections slowed", "broker links", repeats=True)
async def slow_broker(world: World) -> None:
    """Every packet between some processes and RabbitMQ is late."""
    await _slow(world, world.some_links(world.broker_links))


@_fault("closed before confirm", "broker links", repeats=True)
async def close_before_confirm(world: World) -> None:
    """RabbitMQ gets what is published, its confirms are lost and then the connection."""
    links = [link for link in world.broker_links if link.name.startswith("relay")]
    for _ in range(world.chance.randint(1, 3)):
        victims = world.chance.sample(links, k=world.chance.randint(1, len(links)))
        seconds = world.some_seconds(0.6)
        await asyncio.gather(*(link.swallow_answers_and_cut(seconds) for link in victims))
        await asyncio.sleep(world.some_seconds(0.5))


@_fault("messages returned", "broker", "broker links", repeats=True)
async def return_messages(world: World) -> None:
    """No queue is bound to request.created: mandatory messages come back.

    A process declares the bindings when it connects and each minute after, so none may do so meanwhile.
    The queue of the product is bound twice, to its exchange and to our switch, so that the switch takes the
    events from all at once.
    """
    async with _no_new_connections(world), queues.open_channel(world.servers.broker.url) as channel:
        notifications = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
        switch = await channel.get_exchange(own_queues.SWITCH, ensure=False)
        await notifications.unbind(topology.REQUESTS, CREATED)
        await switch.unbind(topology.REQUESTS, CREATED)
        try:
            await asyncio.sleep(world.some_seconds(2.5))
        finally:
            await switch.bind(topology.REQUESTS, CREATED)
            await notifications.bind(topology.REQUESTS, CREATED)


@_fault("queue deleted", "broker", "broker links", repeats=True)
async def delete_queue(world: World) -> None:
    """The empty queue is deleted under its consumers, who make it again before anything is published."""
    relays = [link for link in world.broker_links if link.name.startswith("relay")]
    async with queues.open_channel(world.servers.broker.url) as channel:
        for link in relays:
            await link.stop_listening()
            await link.cut()
        try:
            await _delete_when_empty(world)
            await _until_declared(world)
            switch = await channel.get_exchange(own_queues.SWITCH, ensure=False)
            notifications = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
            await notifications.bind(switch)
        finally:
            for link in relays:
                await link.listen()


@_fault("messages refused", "broker", "broker links", repeats=True)
async def refuse_messages(world: World) -> None:
    """Another team's queue is full and refuses every event, while all others take it."""
    async with queues.open_channel(world.servers.broker.url) as channel:
        full = await channel.declare_queue(
            _FULL, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        try:
            await full.bind(topology.REQUESTS, "request.*")
            began = time.monotonic()
            await asyncio.sleep(world.chance.uniform(1.0, world.longest_stall_seconds + 4.0))
            world.record.refusals.append(Interval(began, time.monotonic()))
            if world.chance.random() < 0.5:  # Its team comes back, before it deletes it.
                await full.consume(_drop, no_ack=True)
                await asyncio.sleep(world.some_seconds(1.0))
        finally:
            await full.delete(if_unused=False, if_empty=False)


async def _drop(_: AbstractIncomingMessage) -> None:
    """Be done with a message."""


# What is malformed


@_fault("poison rows", "rows", "postgres", repeats=False)
async def poison_outbox(world: World) -> None:
    """Events that no AMQP message can carry, some with a good event behind them."""
    rows = [new_request_id() for _ in range(world.chance.randint(1, 5))]
    with_follower = [row for row in rows if world.chance.random() < 0.5]
    world.record.poison_rows.update(f"{uuid_of(row)} {_TOO_LONG_A_TYPE}" for row in rows)
    world.record.poison_followers.update(f"{uuid_of(row)} request.calculated" for row in with_follower)

    async def insert(connection: Connection) -> None:
        async with connection.transaction():
            for row in rows:
                await _insert_event(connection, row, _TOO_LONG_A_TYPE, sequence=1)
            for row in with_follower:
                await _insert_event(connection, row, "request.calculated", sequence=2)

    await world.on_postgres(insert)


async def _insert_event(connection: Connection, request_id: UUID, type_: str, *, sequence: int) -> None:
    # Again after an outcome that nobody knows: the same rows must not be there twice.
    await connection.execute(
        """
        INSERT INTO outbox (lane, request_id, type, sequence, payload)
        SELECT $1, $2, $3, $4, $5
         WHERE NOT EXISTS (SELECT FROM outbox WHERE request_id = $2 AND sequence = $4)
           AND NOT EXISTS (SELECT FROM outbox_held WHERE request_id = $2 AND sequence = $4)
        """,
        writing.lane_of(request_id),
        request_id,
        type_,
        sequence,
        b'{"poison": true}',
    )


@_fault("poison messages", "messages", "broker", repeats=False)
async def poison_queues(world: World) -> None:
    """Messages on both queues that can never be handled."""
    stranger = uuid_of(new_request_id())
    bodies = [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"specversion": "1.0", "id": "x", "source": "x", "type": "other", "data": {}}',
        msgspec.json.encode(CalculationCreated(stranger, "calculation-of-nothing")),
    ]
    other_calculation = await _another_calculation(world)
    async with queues.open_channel(world.servers.broker.url) as channel:
        for queue in (topology.NOTIFICATIONS, topology.CALCULATION_RESULTS):
            for body in world.chance.sample(bodies, k=3):
                await _publish_poison(world, channel, queue, body)
        if other_calculation is not None:
            await _publish_poison(world, channel, topology.CALCULATION_RESULTS, other_calculation)


async def _another_calculation(world: World) -> bytes | None:
    """Return a second, different calculation for a request that has one."""
    found: list[UUID] = []

    async def find(connection: Connection) -> None:
        row = await connection.fetchval(
            "SELECT id FROM calculation_request WHERE calculation_id IS NOT NULL ORDER BY id DESC LIMIT 1"
        )
        found.extend([row] if row else [])

    await world.on_postgres(find)
    if not found:
        return None
    return msgspec.json.encode(CalculationCreated(uuid_of(found[0]), "another-calculation"))


async def _publish_poison(world: World, channel: AbstractChannel, queue: topology.Queue, body: bytes) -> None:
    message_id = f"poison-{len(world.record.poison_messages)}"
    world.record.poison_messages.add(f"{queue.name} {message_id}")
    message = Message(body, message_id=message_id, delivery_mode=DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, queue.name, mandatory=True)


# The mail server


@_fault("mail refused for now", "mail", repeats=False)
async def refuse_mail(world: World) -> None:
    """Every e-mail is answered with a 4xx."""
    world.mail.refusal = b"451 4.3.0 try again later"
    try:
        await asyncio.sleep(world.some_seconds())
    finally:
        world.mail.refusal = None


@_fault("mail server away", "mail", repeats=False)
async def take_mail_server_away(world: World) -> None:
    """Every connection breaks, and none is taken."""
    world.mail.stop()
    try:
        await asyncio.sleep(world.some_seconds())
    finally:
        await world.mail.start()


@_fault("mail server stalled", "mail", repeats=False)
async def stall_mail(world: World) -> None:
    """No answer to anything, until all are given."""
    world.mail.stall()
    try:
        await asyncio.sleep(world.stall_seconds())
    finally:
        world.mail.resume()


@_fault("mail server dies after acceptance", "mail", repeats=False)
async def lose_mail_answers(world: World) -> None:
    """The connection breaks when the e-mail is taken and before the answer is sent."""
    world.mail.death_rate = world.chance.uniform(0.2, 1.0)
    try:
        await asyncio.sleep(world.some_seconds(2.0))
    finally:
        world.mail.death_rate = 0.0


@_fault("mail server hangs up", "mail", repeats=False)
async def hang_up_mail(world: World) -> None:
    """The mail server closes every connection before the content: after RCPT, or when it has asked for it."""
    world.mail.hangs_up_after = world.chance.choice(("RCPT", "DATA"))
    try:
        await asyncio.sleep(world.some_seconds())
    finally:
        world.mail.hangs_up_after = None


# What several have in common


async def _cut_again_and_again(world: World, links: Sequence[TcpProxy]) -> None:
    for _ in range(world.chance.randint(1, 4)):
        for link in links:
            await link.cut()
        await asyncio.sleep(world.some_seconds(0.5))


async def _refuse(world: World, links: Sequence[TcpProxy]) -> None:
    for link in links:
        await link.stop_listening()
        await link.cut()
    try:
        await asyncio.sleep(world.some_seconds())
    finally:
        for link in links:
            await link.listen()


async def _stall(world: World, links: Sequence[TcpProxy]) -> None:
    cut = world.chance.random() < 0.5
    for link in links:
        link.stall()
    try:
        await asyncio.sleep(world.stall_seconds())
    finally:
        for link in links:
            if cut:
                await link.cut()
            link.resume()


async def _strand(world: World, links: Sequence[TcpProxy]) -> None:
    for link in links:
        link.strand()
    try:
        await asyncio.sleep(world.stall_seconds())
    finally:
        for link in links:
            link.clear_stranded()


async def _slow(world: World, links: Sequence[TcpProxy]) -> None:
    bytes_per_second = world.chance.choice((20_000.0, 100_000.0, 1_000_000.0))
    delay_seconds = world.chance.choice((0.005, 0.05, 0.2))
    for link in links:
        link.slow(bytes_per_second=bytes_per_second, delay_seconds=delay_seconds)
    try:
        await asyncio.sleep(world.some_seconds())
    finally:
        for link in links:
            link.hurry()


@asynccontextmanager
async def _no_new_connections(world: World) -> AsyncIterator[None]:
    """Have every process connect, and then no more: none declares its bindings for a minute."""
    for link in world.broker_links:
        await link.cut()
    await until(
        lambda: all(
            link.is_open and link.youngest_seconds >= _SETTLED_SECONDS for link in world.broker_links
        ),
        seconds=_RECONNECTED_SECONDS,
    )
    for link in world.broker_links:
        await link.stop_listening()
    try:
        await until(
            lambda: all(link.youngest_seconds >= _SETTLED_SECONDS for link in world.broker_links),
            seconds=_EMPTY_SECONDS,
        )
        yield
    finally:
        for link in world.broker_links:
            await link.listen()


async def _delete_when_empty(world: World) -> None:
    """Delete the queue of notifications at a moment at which nothing is in it, in hand included."""
    async with queues.open_channel(world.servers.broker.url) as channel:

        async def is_empty() -> bool:
            waiting = await queues.count(channel, topology.NOTIFICATIONS.name)
            return waiting == 0 and not await _unwritten(world)

        if await until(is_empty, seconds=_EMPTY_SECONDS):
            await channel.queue_delete(topology.NOTIFICATIONS.name)


async def _unwritten(world: World) -> bool:
    """Whether a request.created is still on its way to the ledger of e-mails."""
    counts: list[Any] = []

    async def count(connection: Connection) -> None:
        counts.append(
            await connection.fetchval(
                """
                SELECT count(*)
                  FROM calculation_request
                 WHERE NOT EXISTS (SELECT FROM email WHERE email.request_id = calculation_request.id)
                   AND NOT EXISTS (SELECT FROM outbox WHERE outbox.request_id = calculation_request.id)
                   AND NOT EXISTS (SELECT
                                     FROM outbox_held
                                    WHERE outbox_held.request_id = calculation_request.id)
                """
            )
        )

    await world.on_postgres(count)
    return bool(counts[-1])


async def _until_declared(world: World) -> None:
    async def exists() -> bool:
        try:
            async with queues.open_channel(world.servers.broker.url) as channel:
                await queues.count(channel, topology.NOTIFICATIONS.name)
        except ChannelNotFoundEntity:
            return False
        return True

    await until(exists, seconds=_EMPTY_SECONDS)
