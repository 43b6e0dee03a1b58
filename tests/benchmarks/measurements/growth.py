"""Growth: whether create, list and relay slow down with many stored requests, or many dead rows."""

from contextlib import AsyncExitStack
from functools import partial

from tests.benchmarks import outboxes, subjects
from tests.benchmarks.comparison import Bar, Comparison, Figures, Measure
from tests.benchmarks.http_load import load
from tests.benchmarks.measurements.create import create_on
from tests.benchmarks.measurements.relay import drained
from tests.benchmarks.rows import fill
from tests.benchmarks.stand import Stand

_LIST = "/v1/request?limit=20"
_LIMIT = 0.9
_FREE, _HELD = "vacuumed", "with an old snapshot"
_LARGEST_DRAIN = 1_000_000  # events: more than a relay delivers in its time


async def measure(stand: Stand) -> list[Comparison]:
    """Fill a database for each size, then measure them in turn."""
    urls = {f"{rows:,} rows": await stand.database(f"growth-{rows}") for rows in stand.sizes.rows}
    for url, rows in zip(urls.values(), stand.sizes.rows, strict=True):
        async with stand.connected(url) as connection:
            await fill(connection, rows=rows)
    drains: dict[str, Measure] = {
        side: partial(_drain, stand, url, rows)
        for (side, url), rows in zip(urls.items(), stand.sizes.rows, strict=True)
        if rows <= _LARGEST_DRAIN
    }
    comparisons = [await _compare(stand, "relay with many pending", drains), await _dead_rows(stand)]
    async with AsyncExitStack() as stack:
        apis = {side: await stack.enter_async_context(stand.api(url)) for side, url in urls.items()}
        creates: dict[str, Measure] = {side: partial(create_on, stand, api) for side, api in apis.items()}
        comparisons.append(await _compare(stand, "create with many stored", creates))
        lists: dict[str, Measure] = {
            side: partial(load, stand, api.base_url, [_LIST]) for side, api in apis.items()
        }
        comparisons.append(await _compare(stand, "list with many stored", lists))
    return comparisons


async def _compare(stand: Stand, name: str, sides: dict[str, Measure]) -> Comparison:
    smallest, *larger = sides
    return await stand.compare(name, sides, [Bar(side=side, of=smallest, limit=_LIMIT) for side in larger])


async def _dead_rows(stand: Stand) -> Comparison:
    """Fill and drain two outboxes in turn, while a snapshot keeps the dead rows of one of them."""
    urls = {side: await stand.database(f"growth {side}") for side in (_FREE, _HELD)}
    async with stand.connected(urls[_HELD]) as holder:
        await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM outbox")
        sides: dict[str, Measure] = {
            side: partial(_drain, stand, url, stand.sizes.events, with_dead_rows=True)
            for side, url in urls.items()
        }
        return await _compare(stand, "relay over dead rows", sides)


async def _drain(stand: Stand, url: str, events: int, *, with_dead_rows: bool = False) -> Figures:
    """Fill the outbox, unless an earlier round has left enough in it, and relay it."""
    async with stand.connected(url) as connection:
        if with_dead_rows:
            await connection.execute(outboxes.OURS.fill, events, subjects.event())
        elif await connection.fetchval(outboxes.OURS.pending) < events:
            await outboxes.OURS.refill(connection, events)
        return await drained(stand, outboxes.our_relays(stand)(url), connection, outboxes.OURS.pending)
