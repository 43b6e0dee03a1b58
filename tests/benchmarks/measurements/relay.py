"""Relay: pending events to a durable quorum queue, compared with the fastest relays found on PyPI.

All sides start with a full outbox and the same empty queue. The rate of each is that at which the queue
fills, from the first events until the last one is settled in the outbox, or until its time is up.
"""

from functools import partial

from tests.benchmarks.comparison import Bar, Comparison, Figures
from tests.benchmarks.outboxes import FASTSTREAM, OURS, TXOUTBOX, Outbox
from tests.benchmarks.stand import Stand, compare
from tests.harness import databases

_FLOORS = [
    Bar(side=TXOUTBOX.side, of=OURS.side, limit=2.7),
    Bar(side=FASTSTREAM.side, of=OURS.side, limit=7.3),
]


async def measure(stand: Stand) -> list[Comparison]:
    sides = {outbox.side: partial(_relay, outbox, stand) for outbox in (OURS, TXOUTBOX, FASTSTREAM)}
    return [await compare("relay", sides, _FLOORS, stand)]


async def _relay(outbox: Outbox, stand: Stand) -> Figures:
    url = await outbox.open(stand)
    async with databases.connected(url) as connection:
        await outbox.refill(connection)
        return await outbox.drain(stand, connection, url)
