"""The faults: each a function that returns when the fault has ended. All choices are the world's chance."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import msgspec
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel
from aiormq.exceptions import ChannelNotFoundEntity

from service import outbox
from service.events import CalculationCreated
from service.identifiers import new_request_id, uuid_of
from service.postgres import Connection
from tests.faults import queues
from tests.faults.proxy import Proxy
from tests.faults.records import CREATED, Span
from tests.faults.waiting import until
from tests.faults.world import HARNESS, World
from worker import topology

_FULL = "harness.full"
_TOO_LONG_A_TYPE = "request." + "x" * 300  # a routing key holds 255 bytes
_EMPTY_SECONDS = 30.0
_KEEPALIVE_SECONDS = 30.0  # after which the network would tell Postgres; by default it takes two hours
_SETTLED_SECONDS = 1.0  # a connection older than this has declared what it declares


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
    """SIGKILL to the API."""
    await _kill(world, "api")


async def _kill(world: World, role: str) -> None:
    victims = world.of_role(role)
    if world.chance.random() < 0.7:
        victims = [world.chance.choice(victims)]
    await asyncio.sleep(world.some_seconds(0.5))
    await asyncio.gather(*(victim.kill() for victim in victims))


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

    Who connects declares the bindings again, so nobody may connect meanwhile. The queue of the product is
    bound twice, to its exchange and to our switch, so that the switch takes the events from all at once.
    """
    async with _no_new_connections(world), queues.open_channel(world.servers.broker.url) as channel:
        notifications = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
        switch = await channel.get_exchange(queues.SWITCH, ensure=False)
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
            await link.refuse()
            link.cut()
        try:
            await _delete_when_empty(world)
            await _until_declared(world)
            switch = await channel.get_exchange(queues.SWITCH, ensure=False)
            notifications = await channel.get_queue(topology.NOTIFICATIONS.name, ensure=False)
            await notifications.bind(switch)
        finally:
            for link in relays:
                await link.admit()


@_fault("messages refused", "broker", "broker links", repeats=True)
async def refuse_messages(world: World) -> None:
    """A full queue refuses every event, while all others take it."""
    async with queues.open_channel(world.servers.broker.url) as channel:
        full = await channel.declare_queue(
            _FULL, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        try:
            await full.bind(topology.REQUESTS, "request.#")
            await asyncio.sleep(world.some_seconds(2.0))
        finally:
            await full.delete(if_unused=False, if_empty=False)


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
        outbox.lane_of(request_id),
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
    world.mail.go_away()
    try:
        await asyncio.sleep(world.some_seconds())
    finally:
        await world.mail.come_back()


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


# What several have in common


async def _cut_again_and_again(world: World, links: Sequence[Proxy]) -> None:
    for _ in range(world.chance.randint(1, 4)):
        for link in links:
            link.cut()
        await asyncio.sleep(world.some_seconds(0.5))


async def _refuse(world: World, links: Sequence[Proxy]) -> None:
    for link in links:
        await link.refuse()
        link.cut()
    try:
        await asyncio.sleep(world.some_seconds())
    finally:
        for link in links:
            await link.admit()


async def _stall(world: World, links: Sequence[Proxy]) -> None:
    cut = world.chance.random() < 0.5
    for link in links:
        link.stall()
    try:
        await asyncio.sleep(world.stall_seconds())
    finally:
        for link in links:
            if cut:
                link.cut()
            link.resume()


async def _strand(world: World, links: Sequence[Proxy]) -> None:
    for link in links:
        link.strand()
    try:
        await asyncio.sleep(world.stall_seconds())
    finally:
        for link in links:
            link.clear_stranded()


async def _slow(world: World, links: Sequence[Proxy]) -> None:
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
    for link in world.broker_links:
        await link.refuse()
    try:
        await until(
            lambda: all(link.youngest_seconds >= _SETTLED_SECONDS for link in world.broker_links),
            seconds=_EMPTY_SECONDS,
        )
        yield
    finally:
        for link in world.broker_links:
            await link.admit()


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
