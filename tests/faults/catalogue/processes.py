"""Faults of the service's processes and of their connections: killed, frozen, cut, slowed, a wrong clock."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from service.postgres import connections
from tests.faults.world import CLOCKS, RETENTION_DAYS, Worker, World, fault
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import until
from worker.process import ROLES

Links = Sequence[TcpProxy]
_LOCKS = ("postgres", "backends", "postgres links")


@fault("APIs killed amid repeats", "api")
async def kill_apis_amid_repeats(world: World) -> bool:
    """SIGKILL to one API after the other, while both get creates that are repeated under their keys."""
    statuses = []
    async with asyncio.TaskGroup() as calling:
        for api in world.chance.sample(world.of_role("api"), k=2):
            for _ in range(10):
                calling.create_task(world.callers.create_with_key())
            await asyncio.sleep(world.chance.uniform(0.0, 0.2))
            statuses.append(await api.kill())
            if world.chance.random() < 0.7:
                await api.may_become_ready()
    return {*statuses} == {-signal.SIGKILL}


async def _kill(role: str, world: World) -> bool:
    victims = [world.one_of(role)] if world.chance.random() < 0.7 else world.of_role(role)
    await asyncio.sleep(world.some_seconds(0.5))
    statuses = await asyncio.gather(*(victim.kill() for victim in victims))
    return {*statuses} == {-signal.SIGKILL}


for _role in (*ROLES, "api"):
    fault(f"{_role} killed", _role, repeats=_role == "relay")(partial(_kill, _role))


@fault("relay frozen", "relay", *_LOCKS, repeats=True)
async def freeze_relay(world: World) -> bool:
    """SIGSTOP to a relay for longer than Postgres lets it keep its locks."""
    seconds = connections.SILENCE_SECONDS + world.chance.uniform(1.0, 3.0)
    return await world.one_of("relay").freeze_for(seconds)


@fault("notifications frozen", "notifications", "mail", *_LOCKS)
async def freeze_notifications(world: World) -> bool:
    """SIGSTOP to a sender for longer than its claims, between the RCPT and the content of its e-mails.

    Not after the content: other senders cannot know of an acceptance that the frozen one has not recorded.
    """
    sender = world.one_of("notifications")
    seconds = world.record.plan.email_claim_seconds + world.chance.uniform(3.0, 5.0)
    with world.mail.holding(sender.name, "RCPT"):
        # Three of the four that a process sends at once.
        are_held = await until(lambda: world.mail.held >= 3, seconds=5.0)
        async with asyncio.TaskGroup() as group:
            frozen = group.create_task(sender.freeze_for(seconds))
            await asyncio.sleep(0.2)  # from the SIGSTOP until the process has stopped
            world.mail.release()
    return are_held and frozen.result()


@fault("rolling restart", *ROLES, "api")
async def restart_all(world: World) -> bool:
    """SIGTERM to one process after the other, at times before the one before is ready again."""
    before = {worker.running.pid for worker in world.workers}
    for worker in world.chance.sample(world.workers, k=len(world.workers)):
        await worker.restart()
        if world.chance.random() < 0.5:
            await worker.may_become_ready()
    return before.isdisjoint(worker.running.pid for worker in world.workers)


async def _wrong_clock(role: str, days: int, world: World) -> bool:
    """Start one process of a role again, with a wrong clock for a while. Postgres's is right."""
    worker = world.one_of(role)
    await worker.restart(clock_off_by=days)
    try:
        await worker.may_become_ready()
        await _AMID[role](worker, world)
        return worker.has_other_clock
    finally:
        await worker.restart()


async def _be_named(relay: Worker, world: World) -> None:
    """A relay begins to erase when it starts. By the wrong clock, every request may be old enough."""
    await world.is_named(relay, *["this machine's clock shows"] * 2)


async def _send_late(_: Worker, world: World) -> None:
    """The mail server refuses e-mails for now. By the wrong clock, each may have been refused for days."""
    with world.mail.refusing():
        await asyncio.sleep(1.5)


async def _create(api: Worker, world: World) -> None:
    """An API stores requests, and then a relay begins to erase. The tokens are valid by both clocks."""
    client = world.callers.apis[world.of_role("api").index(api)]
    statuses = await asyncio.gather(*(world.callers.post(client) for _ in range(20)))
    # A process that has just started may have no time on a busy machine. But it refuses none.
    answered = [200 in statuses, *(status == 200 for status in statuses if status not in (None, 503))]
    world.record.calls["POST /v1/request, wrong clock"] += answered
    await world.one_of("relay").restart()
    await asyncio.sleep(world.some_seconds())


_AMID = {"relay": _be_named, "notifications": _send_late, "api": _create}
for _role in _AMID:
    for _state, _days in (("ahead", RETENTION_DAYS + 1), ("behind", -RETENTION_DAYS - 1)):
        _touches = (CLOCKS, _role, "relay", "mail", *_LOCKS)
        fault(f"clock of {_role} {_state}", *_touches)(partial(_wrong_clock, _role, _days))


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
        asyncio.get_running_loop().call_later(30.0, link.clear_stranded)


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
