"""Faults of the service's own processes: killed, frozen, restarted."""

import asyncio
import signal
from functools import partial

from service.postgres import connections
from tests.faults.catalogue.fault import fault
from tests.faults.world.world import World
from tests.harness.waiting import until
from worker.process import ROLES

_REPEATED_AT_ONCE = 10  # keys
_HELD_SECONDS = 5.0
_HELD_AT_ONCE = 3  # of the four that a process sends at once
_FREEZING_SECONDS = 0.2  # from a SIGSTOP until the process has stopped


@fault("APIs killed amid repeats", "api", repeats=False)
async def kill_apis_amid_repeats(world: World) -> bool:
    """SIGKILL to one API after the other, while both get creates that are repeated under their keys."""
    statuses = []
    async with asyncio.TaskGroup() as calling:
        for api in world.chance.sample(world.of_role("api"), k=2):
            for _ in range(_REPEATED_AT_ONCE):
                calling.create_task(world.callers.create_with_key())
            await asyncio.sleep(world.chance.uniform(0.0, 0.2))
            statuses.append(await api.kill())
            if world.chance.random() < 0.7:
                await api.may_become_ready()
    return {*statuses} == {-signal.SIGKILL}


async def _kill(role: str, world: World) -> bool:
    victims = world.of_role(role)
    if world.chance.random() < 0.7:
        victims = [world.chance.choice(victims)]
    await asyncio.sleep(world.some_seconds(0.5))
    statuses = await asyncio.gather(*(victim.kill() for victim in victims))
    return {*statuses} == {-signal.SIGKILL}


for _name, _role in (*zip(ROLES, ROLES, strict=True), ("API", "api")):
    fault(f"{_name} killed", _role, repeats=_role == "relay")(partial(_kill, _role))


@fault("relay frozen", "relay", "postgres", "backends", "postgres links", repeats=True)
async def freeze_relay(world: World) -> bool:
    """SIGSTOP to a relay for longer than Postgres lets it keep its locks."""
    seconds = connections.SILENCE_SECONDS + world.chance.uniform(1.0, 3.0)
    return await world.chance.choice(world.of_role("relay")).freeze_for(seconds)


@fault(
    "notifications frozen",
    *("notifications", "mail", "postgres", "backends", "postgres links"),
    repeats=False,
)
async def freeze_notifications(world: World) -> bool:
    """SIGSTOP to a sender for longer than its claims, between the RCPT and the content of its e-mails.

    Not after the content: other senders cannot know of an acceptance that the frozen one has not recorded.
    """
    sender = world.chance.choice(world.of_role("notifications"))
    world.mail.hold(sender.name, "RCPT")
    try:
        are_held = await until(lambda: world.mail.held >= _HELD_AT_ONCE, seconds=_HELD_SECONDS)
        async with asyncio.TaskGroup() as group:
            seconds = world.record.email_claim_seconds + world.chance.uniform(3.0, 5.0)
            frozen = group.create_task(sender.freeze_for(seconds))
            await asyncio.sleep(_FREEZING_SECONDS)
            world.mail.release()
        return are_held and frozen.result()
    finally:
        world.mail.release()


@fault("rolling restart", *ROLES, "api", repeats=False)
async def restart_all(world: World) -> bool:
    """SIGTERM to one process after the other, at times before the one before is ready again."""
    before = {worker.running.pid for worker in world.workers}
    for worker in world.chance.sample(world.workers, k=len(world.workers)):
        await worker.restart()
        if world.chance.random() < 0.5:
            await worker.may_become_ready()
    return before.isdisjoint(worker.running.pid for worker in world.workers)
