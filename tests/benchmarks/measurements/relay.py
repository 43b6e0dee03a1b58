"""Relay: pending events to a durable quorum queue, compared with relays from PyPI.

Every side starts with a full outbox and the same empty queue. Its rate is that at which the queue fills, from
the first events until the last one is settled in the outbox, or until its time is up.
"""

from functools import partial

from tests.benchmarks.comparison import Bar, Comparison, Figures
from tests.benchmarks.outboxes import FASTSTREAM, OURS, TXOUTBOX, Outbox
from tests.benchmarks.stand import Stand, compare
from tests.harness import databases

_TWO = "ours, two processes"
_BARS = (
    Bar(side=_TWO, of=OURS.side, limit=1.0),
    Bar(side=OURS.side, of=TXOUTBOX.side, limit=2.0),
    Bar(side=OURS.side, of=FASTSTREAM.side, limit=3.0),
)


async def measure(stand: Stand) -> list[Comparison]:
    """Have every relay deliver the same events, or as many of them as it can in its time."""
    sides = {outbox.side: partial(relay, outbox, stand) for outbox in (OURS, TXOUTBOX, FASTSTREAM)}
    sides[_TWO] = partial(relay, OURS, stand, processes=2)
    return [await compare("relay", sides, _BARS, stand)]


async def relay(outbox: Outbox, stand: Stand, *, processes: int = 1) -> Figures:
    """Fill an outbox, and relay it."""
    url = await outbox.open(stand)
    async with databases.connected(url) as connection:
        await outbox.refill(connection)
        return await outbox.drain(stand, connection, url, processes=processes)
