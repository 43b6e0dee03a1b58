"""What a fault is, and the list of all of them."""

import time
from collections.abc import Awaitable, Callable

import msgspec

from tests.faults.records import Span
from tests.faults.world import World

Injection = Callable[[World], Awaitable[bool]]


class Fault(msgspec.Struct, frozen=True):
    """An injection, and what it touches: faults that touch the same thing are never mixed."""

    name: str
    inject: Injection
    touches: frozenset[str]
    repeats_events: bool  # it may come between a confirm and its settling

    async def happen(self, world: World) -> None:
        """Inject it, and record from when until when, and whether its effect was seen."""
        began = time.monotonic()
        is_seen = await self.inject(world)
        world.record.spans.append(Span(self.name, began, time.monotonic(), self.repeats_events, is_seen))


CLOCKS = "clocks"  # touched by faults that need libfaketime
FAULTS: list[Fault] = []
CLUSTER_FAULTS: list[Fault] = []  # of a cluster of RabbitMQ and a pair of Postgres


def fault(
    name: str, *touches: str, repeats: bool = False, among: list[Fault] = FAULTS
) -> Callable[[Injection], Injection]:
    """Add the decorated function to a list. It returns when the fault has ended, however it ends.

    It returns whether its effect was seen. An injection without an effect does not count.

    *repeats*: the fault may keep a confirmed event from being settled, so the event may come again. Every
    choice is made with `world.chance`, so that a seed repeats it.
    """

    def register(inject: Injection) -> Injection:
        among.append(Fault(name, inject, frozenset(touches), repeats))
        return inject

    return register
