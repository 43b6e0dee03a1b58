"""Growth: whether create, list and relay slow down with many stored requests, or many dead rows."""

from contextlib import AsyncExitStack
from functools import partial

from tests.benchmarks import outboxes, subjects
from tests.benchmarks.comparison import Bar, Comparison, Figures, Measure, compare
from tests.benchmarks.http_load import throughput
from tests.benchmarks.measurements.reading import LIST
from tests.benchmarks.measurements.relay import drained
from tests.benchmarks.outboxes import our_relays
from tests.benchmarks.rows import fill
from tests.benchmarks.stand import Stand
from tests.harness.processes import Process

_LIMIT = 0.9
FREE, HELD = "vacuumed", "with an old snapshot"
_LARGEST_DRAIN = 1_000_000  # events: more than a relay delivers in its time


async def measure(stand: Stand) -> list[Comparison]:
    """Fill a database for each size, then measure them in turn."""
    sizes = {f"{rows:,} rows": rows for rows in stand.sizes.rows}
    urls = {}
    for side, rows in sizes.items():
        urls[side] = await stand.database(f"growth-{rows}")
        async with stand.connected(urls[side]) as connection:
            await fill(connection, rows=rows)
    drains = {
        side: _draining(stand, urls[side], rows) for side, rows in sizes.items() if rows <= _LARGEST_DRAIN
    }
    comparisons = [await _compare(stand, "relay with many pending", drains), await _dead_rows(stand)]
    async with AsyncExitStack() as stack:
        apis = {side: await stack.enter_async_context(stand.api(url)) for side, url in urls.items()}
        creates = {side: _creating(stand, api) for side, api in apis.items()}
        comparisons.append(await _compare(stand, "create with many stored", creates))
        lists = {side: _listing(stand, api) for side, api in apis.items()}
        comparisons.append(await _compare(stand, "list with many stored", lists))
    return comparisons


async def _compare(stand: Stand, name: str, sides: dict[str, Measure]) -> Comparison:
    smallest, *larger = sides
    bars = [Bar(side=side, of=smallest, limit=_LIMIT) for side in larger]
    return await compare(name, sides, bars, rounds=stand.sizes.rounds, settle=stand.settle)


async def _dead_rows(stand: Stand) -> Comparison:
    """Fill and drain two outboxes in turn, while a snapshot keeps the dead rows of one of them."""

    async def drain(url: str) -> Figures:
        async with stand.connected(url) as connection:
            await connection.execute(outboxes.OURS.fill, stand.sizes.events, subjects.event())
            return await drained(stand, our_relays(stand)(url), connection, outboxes.OURS.pending)

    urls = {side: await stand.database(f"growth {side}") for side in (FREE, HELD)}
    async with stand.connected(urls[HELD]) as holder:
        await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM outbox")
        sides: dict[str, Measure] = {side: partial(drain, url) for side, url in urls.items()}
        return await _compare(stand, "relay over dead rows", sides)


def _draining(stand: Stand, url: str, rows: int) -> Measure:
    async def measure() -> Figures:
        async with stand.connected(url) as connection:
            if await connection.fetchval("SELECT count(*) FROM outbox") < rows:
                await outboxes.OURS.refill(connection, rows)
            return await drained(stand, our_relays(stand)(url), connection, outboxes.OURS.pending)

    return measure


def _creating(stand: Stand, api: Process) -> Measure:
    async def measure() -> Figures:
        return await throughput(stand, api.base_url, ["/v1/request"], body=subjects.JSON_BODY)

    return measure


def _listing(stand: Stand, api: Process) -> Measure:
    async def measure() -> Figures:
        return await throughput(stand, api.base_url, [LIST])

    return measure
