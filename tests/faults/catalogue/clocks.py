"""Faults of clocks: that of one process's machine is days ahead or behind, Postgres's is right."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from unittest.mock import patch

from tests.faults.catalogue.fault import CLOCKS, fault
from tests.faults.world.stage import RETENTION_DAYS
from tests.faults.world.workers import Worker
from tests.faults.world.world import World

_BOTH_SHOWN = "this machine's clock shows"
_CREATES = 20
_REFUSED_SECONDS = 1.5


@asynccontextmanager
async def _wrong_clock(world: World, role: str, days: int) -> AsyncIterator[Worker]:
    """Start one process of a role again, with a wrong clock until the block is left."""
    worker = world.chance.choice(world.of_role(role))
    await worker.restart(clock_off_by=days)
    try:
        await worker.may_become_ready()
        yield worker
    finally:
        await worker.restart()


async def _of_relay(days: int, world: World) -> bool:
    """A relay begins to erase when it starts. By the wrong clock, every request may be old enough."""
    async with _wrong_clock(world, "relay", days) as relay:
        await world.is_named(relay, _BOTH_SHOWN, _BOTH_SHOWN)
        return relay.has_other_clock


async def _of_sender(days: int, world: World) -> bool:
    """The mail server refuses e-mails for now. By the wrong clock, each may have been refused for days."""
    async with _wrong_clock(world, "notifications", days) as sender:
        refusal = b"451 4.3.0 try again later"
        with patch.dict(world.mail.replies, {"RCPT": refusal, "content": refusal}):
            await asyncio.sleep(_REFUSED_SECONDS)
        return sender.has_other_clock


async def _of_api(days: int, world: World) -> bool:
    """An API stores requests, and then a relay begins to erase. The tokens are valid by both clocks."""
    async with _wrong_clock(world, "api", days) as api:
        client = world.callers.apis[world.of_role("api").index(api)]
        statuses = await asyncio.gather(*(world.callers.post(client) for _ in range(_CREATES)))
        answered = world.record.calls.setdefault("POST /v1/request, wrong clock", [])
        # A process that has just started may have no time on a busy machine. But it refuses none.
        answered += [200 in statuses, *(status == 200 for status in statuses if status not in (None, 503))]
        await world.chance.choice(world.of_role("relay")).restart()
        await asyncio.sleep(world.some_seconds())
        return api.has_other_clock


for _name, _role, _inject in (
    ("relay", "relay", _of_relay),
    ("sender", "notifications", _of_sender),
    ("API", "api", _of_api),
):
    for _state, _days in (("ahead", RETENTION_DAYS + 1), ("behind", -RETENTION_DAYS - 1)):
        _touched = (CLOCKS, _role, "relay", "mail", "postgres", "backends", "postgres links")
        fault(f"{_name}'s clock {_state}", *_touched, repeats=False)(partial(_inject, _days))
