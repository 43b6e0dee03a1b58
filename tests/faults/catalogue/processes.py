"""Faults of the service's own processes: killed, frozen, restarted, or with a clock that is days wrong."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from service.postgres import connections
from tests.faults.catalogue.fault import CLOCKS, fault
from tests.faults.workers import Worker
from tests.faults.world import RETENTION_DAYS, World
from tests.harness.waiting import until
from worker.process import ROLES

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
    _name = "API" if _role == "api" else _role
    fault(f"{_name} killed", _role, repeats=_role == "relay")(partial(_kill, _role))


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


@asynccontextmanager
async def _wrong_clock(world: World, role: str, days: int) -> AsyncIterator[Worker]:
    """Start one process of a role again, with a wrong clock until the block is left. Postgres's is right."""
    worker = world.one_of(role)
    await worker.restart(clock_off_by=days)
    try:
        await worker.may_become_ready()
        yield worker
    finally:
        await worker.restart()


async def _of_relay(days: int, world: World) -> bool:
    """A relay begins to erase when it starts. By the wrong clock, every request may be old enough."""
    async with _wrong_clock(world, "relay", days) as relay:
        await world.is_named(relay, *["this machine's clock shows"] * 2)
        return relay.has_other_clock


async def _of_sender(days: int, world: World) -> bool:
    """The mail server refuses e-mails for now. By the wrong clock, each may have been refused for days."""
    async with _wrong_clock(world, "notifications", days) as sender:
        with world.mail.refusing():
            await asyncio.sleep(1.5)
        return sender.has_other_clock


async def _of_api(days: int, world: World) -> bool:
    """An API stores requests, and then a relay begins to erase. The tokens are valid by both clocks."""
    async with _wrong_clock(world, "api", days) as api:
        client = world.callers.apis[world.of_role("api").index(api)]
        statuses = await asyncio.gather(*(world.callers.post(client) for _ in range(20)))
        # A process that has just started may have no time on a busy machine. But it refuses none.
        answered = [200 in statuses, *(status == 200 for status in statuses if status not in (None, 503))]
        world.record.calls["POST /v1/request, wrong clock"] += answered
        await world.one_of("relay").restart()
        await asyncio.sleep(world.some_seconds())
        return api.has_other_clock


for _name, _role, _inject in (
    ("relay", "relay", _of_relay),
    ("sender", "notifications", _of_sender),
    ("API", "api", _of_api),
):
    for _state, _days in (("ahead", RETENTION_DAYS + 1), ("behind", -RETENTION_DAYS - 1)):
        _touched = (CLOCKS, _role, "relay", "mail", *_LOCKS)
        fault(f"{_name}'s clock {_state}", *_touched)(partial(_inject, _days))
