"""Faults of the network between the service's processes and Postgres or RabbitMQ."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from tests.faults.catalogue.fault import fault
from tests.faults.world import World
from tests.harness.tcp_proxy import TcpProxy

_KEEPALIVE_SECONDS = 30.0  # until Postgres learns of a lost client from the network; by default two hours

Links = Sequence[TcpProxy]


async def cut(world: World, links: Links) -> None:
    """RST to every connection, a few times."""
    for _ in range(world.chance.randint(1, 4)):
        for link in links:
            await link.cut()
        await asyncio.sleep(world.some_seconds(0.5))


@asynccontextmanager
async def each(
    links: Links, begin: Callable[[TcpProxy], None], end: Callable[[TcpProxy], Awaitable[None] | None]
) -> AsyncIterator[None]:
    """Call *begin* with each of the links now, and *end* when the block is left."""
    for link in links:
        begin(link)
    try:
        yield
    finally:
        for link in links:
            if (ending := end(link)) is not None:
                await ending


async def refuse(world: World, links: Links) -> None:
    """Connections are cut, and connecting fails."""
    async with each(links, TcpProxy.stop_listening, TcpProxy.start):
        await asyncio.gather(*(link.cut() for link in links))
        await asyncio.sleep(world.some_seconds())


async def stall(world: World, links: Links) -> None:
    """Nothing passes, then all does; at times the connections break at the end."""
    async with each(links, TcpProxy.hold, TcpProxy.resume):
        await asyncio.sleep(world.stall_seconds())
        if world.chance.random() < 0.5:
            await asyncio.gather(*(link.cut() for link in links))


async def strand(world: World, links: Links) -> None:
    """Open connections pass nothing any more. New ones work."""
    async with each(links, TcpProxy.strand, TcpProxy.clear_stranded):
        await asyncio.sleep(world.stall_seconds())


async def slow(world: World, links: Links) -> None:
    """Every packet is late, and the rate is low."""
    rate = world.chance.choice((20_000.0, 100_000.0, 1_000_000.0))
    delay = world.chance.choice((0.005, 0.05, 0.2))
    begin = partial(TcpProxy.slow, bytes_per_second=rate, delay_seconds=delay)
    async with each(links, begin, TcpProxy.hurry):
        await asyncio.sleep(world.some_seconds())


async def vanish(_: World, links: Links) -> None:
    """Connections end for the processes, but not for Postgres: as when a node loses its power."""
    for link in links:
        link.vanish()
        asyncio.get_running_loop().call_later(_KEEPALIVE_SECONDS, link.clear_stranded)


async def _on_some(inject: Callable[[World, Links], Awaitable[None]], to: str, world: World) -> bool:
    """Inject a fault into one process's connections, those of the relays, or all."""
    links = [worker.postgres for worker in world.workers] if to == "Postgres" else world.broker_links
    of_relays = [link for link in links if link.name.startswith("relay")]
    before = _disturbed(links)
    await inject(world, world.chance.choice(([world.chance.choice(links)], of_relays, links)))
    return _disturbed(links) > before


def _disturbed(links: Links) -> int:
    return sum(link.disturbed for link in links)


_OF_BOTH = {"cut": cut, "refused": refuse, "stalled": stall, "half-open": strand, "slowed": slow}
for _to, _touched in (("Postgres", "postgres links"), ("AMQP", "broker links")):
    for _what, _inject in _OF_BOTH.items():
        fault(f"{_to} connections {_what}", _touched, repeats=True)(partial(_on_some, _inject, _to))
fault("Postgres clients vanished", "postgres links", repeats=True)(partial(_on_some, vanish, "Postgres"))


@fault("closed before confirm", "broker links", repeats=True)
async def close_before_confirm(world: World) -> bool:
    """RabbitMQ gets what is published; its confirms are lost, and then the connection."""
    links = [worker.broker for worker in world.of_role("relay")]
    before = _disturbed(links)
    for _ in range(world.chance.randint(1, 3)):
        victims = world.chance.sample(links, k=world.chance.randint(1, len(links)))
        seconds = world.some_seconds(0.6)
        await asyncio.gather(*(link.swallow_answers_and_cut(seconds) for link in victims))
        await asyncio.sleep(world.some_seconds(0.5))
    return _disturbed(links) > before
