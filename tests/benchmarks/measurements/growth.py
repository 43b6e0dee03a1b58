"""Growth: whether create, list and relay slow down with many stored requests or pending events."""

from contextlib import AsyncExitStack
from functools import partial

from tests.benchmarks.comparison import Comparison, Figures, Measure
from tests.benchmarks.http_load import create_on, load
from tests.benchmarks.outboxes import OURS
from tests.benchmarks.rows import fill
from tests.benchmarks.stand import Stand, compare
from tests.harness import databases

_LIST = "/v1/request?limit=20"
_LARGEST_DRAIN = 1_000_000  # events: more than a relay delivers in its time


async def measure(stand: Stand) -> list[Comparison]:
    """Fill a database for each size, then measure them in turn."""
    sizes = {f"{rows:,} rows": rows for rows in stand.sizes.rows}
    urls = {side: await stand.database(f"growth-{rows}") for side, rows in sizes.items()}
    for side, url in urls.items():
        async with databases.connected(url) as connection:
            await fill(connection, rows=sizes[side])
    drains: dict[str, Measure] = {
        side: partial(_drain, stand, urls[side], rows)
        for side, rows in sizes.items()
        if rows <= _LARGEST_DRAIN
    }
    comparisons = [await compare("relay with many pending", drains, (), stand)]
    async with AsyncExitStack() as stack:
        apis = {side: await stack.enter_async_context(stand.api(url)) for side, url in urls.items()}
        creates: dict[str, Measure] = {side: partial(create_on, stand, api) for side, api in apis.items()}
        comparisons.append(await compare("create with many stored", creates, (), stand))
        lists: dict[str, Measure] = {side: partial(load, stand, api, [_LIST]) for side, api in apis.items()}
        comparisons.append(await compare("list with many stored", lists, (), stand))
    return comparisons


async def _drain(stand: Stand, url: str, events: int) -> Figures:
    """Fill the outbox, unless an earlier round has left enough in it, and relay it."""
    async with databases.connected(url) as connection:
        if await connection.fetchval(OURS.pending) < events:
            await OURS.refill(connection, events)
        return await OURS.drain(stand, connection, url)
