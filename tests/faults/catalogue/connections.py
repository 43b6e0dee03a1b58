"""Faults of the network between the service's processes and Postgres or RabbitMQ."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial

from tests.faults.catalogue.fault import fault
from tests.faults.world.world import World
from tests.harness.tcp_proxy import TcpProxy

_KEEPALIVE_SECONDS = 30.0  # until Postgres learns of a lost client from the network; by default two hours

Links = Sequence[TcpProxy]


async def cut(world: World, links: Links) -> None:
    """RST to every connection, a few times."""
    for _ in range(world.chance.randint(1, 4)):
        for link in links:
            await link.cut()
        await asyncio.sleep(world.some_seconds(0.5))


async def refuse(world: World, links: Links) -> None:
    """Connections are cut, and connecting fails."""
    async with AsyncExitStack() as stack:
        for link in links:
            link.stop_listening()
            stack.push_async_callback(link.start)
            await link.cut()
        await asyncio.sleep(world.some_seconds())


async def stall(world: World, links: Links) -> None:
    """Nothing passes, then all does; at times the connections break at the end."""
    breaks = world.chance.random() < 0.5
    with ExitStack() as stack:
        for link in links:
            link.hold()
            stack.callback(link.resume)
        await asyncio.sleep(world.stall_seconds())
        if breaks:
            await asyncio.gather(*(link.cut() for link in links))


async def strand(world: World, links: Links) -> None:
    """Open connections pass nothing any more. New ones work."""
    with ExitStack() as stack:
        for link in links:
            link.strand()
            stack.callback(link.clear_stranded)
        await asyncio.sleep(world.stall_seconds())


async def slow(world: World, links: Links) -> None:
    """Every packet is late, and the rate is low."""
    bytes_per_second = world.chance.choice((20_000.0, 100_000.0, 1_000_000.0))
    delay_seconds = world.chance.choice((0.005, 0.05, 0.2))
    with ExitStack() as stack:
        for link in links:
            link.slow(bytes_per_second=bytes_per_second, delay_seconds=delay_seconds)
            stack.callback(link.hurry)
        await asyncio.sleep(world.some_seconds())


async def _on_some(inject: Callable[[World, Links], Awaitable[None]], to: str, world: World) -> bool:
    """Inject a fault into one process's connections, those of the relays, or all."""
    links = world.postgres_links if to == "Postgres" else world.broker_links
    return await _is_disturbed(links, inject(world, world.some_links(links)))


async def _is_disturbed(links: Links, injection: Awaitable[None]) -> bool:
    """Wait for an injection. Returns whether it met anything on the links."""
    before = sum(link.disturbed for link in links)
    await injection
    return sum(link.disturbed for link in links) > before


for _inject, _to_postgres, _to_rabbitmq in (
    (cut, "Postgres connections cut", "AMQP connections cut"),
    (refuse, "Postgres refuses", "RabbitMQ refuses"),
    (stall, "Postgres connections stalled", "AMQP connections stalled"),
    (strand, "Postgres connections half-open", "AMQP connections half-open"),
    (slow, "Postgres connections slowed", "AMQP connections slowed"),
):
    fault(_to_postgres, "postgres links", repeats=True)(partial(_on_some, _inject, "Postgres"))
    fault(_to_rabbitmq, "broker links", repeats=True)(partial(_on_some, _inject, "RabbitMQ"))


@fault("Postgres clients vanished", "postgres links", repeats=True)
async def vanish_before_postgres(world: World) -> bool:
    """Connections end for the processes, but not for Postgres: as when a node loses its power."""

    async def vanish(links: Links) -> None:
        for link in links:
            link.vanish()
            asyncio.get_running_loop().call_later(_KEEPALIVE_SECONDS, link.clear_stranded)

    return await _is_disturbed(world.postgres_links, vanish(world.some_links(world.postgres_links)))


@fault("closed before confirm", "broker links", repeats=True)
async def close_before_confirm(world: World) -> bool:
    """RabbitMQ gets what is published; its confirms are lost, and then the connection."""
    links = [link for link in world.broker_links if link.name.startswith("relay")]

    async def close() -> None:
        for _ in range(world.chance.randint(1, 3)):
            victims = world.chance.sample(links, k=world.chance.randint(1, len(links)))
            seconds = world.some_seconds(0.6)
            await asyncio.gather(*(link.swallow_answers_and_cut(seconds) for link in victims))
            await asyncio.sleep(world.some_seconds(0.5))

    return await _is_disturbed(links, close())
