"""The cost of a page of the list, in a small table and a large one: `python -m tests.benchmarks.listing`."""

import argparse
import asyncio
import statistics
import time
from uuid import UUID

import asyncpg

from deploy.local.machine.folders import CHECKOUT
from deploy.local.servers import lookup as servers
from service.calculation_requests.reading import Listing, read_page
from service.postgres.pool import Connection
from tests.benchmarks.rows import fill
from tests.harness import databases
from tests.harness.examples import CONVEYANCER

_ROWS = (10_000, 1_000_000)
_TIMES = 1000
_NEWEST = UUID(int=2**128 - 1)


def main() -> None:
    """Measure on a Postgres found or started as for the tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs=2, default=_ROWS, metavar="N", help="of both tables")
    rows = parser.parse_args().rows
    with servers.postgres(CHECKOUT / ".local" / "benchmarks", keep=False, report=print) as server:
        asyncio.run(_compare(server.url, *rows))


async def _compare(url: str, few: int, many: int) -> None:
    small, large = await _measure(url, few), await _measure(url, many)
    print(f"median milliseconds for a page of 20, {_TIMES} times each")
    print(f"{'':16}{few:>12,} rows{many:>12,} rows{'ratio':>8}")
    for name in small:
        print(f"{name:16}{small[name]:>17.3f}{large[name]:>17.3f}{large[name] / small[name]:>8.2f}")


async def _measure(server_url: str, rows: int) -> dict[str, float]:
    """Return the median milliseconds of each kind of page, in a database of its own."""
    async with databases.temporary(server_url, f"listing_{time.time_ns()}") as url:
        connection = await asyncpg.connect(url)
        try:
            await fill(connection, rows=rows)
            return await _pages(connection)
        finally:
            await connection.close()


async def _pages(connection: Connection) -> dict[str, float]:
    oldest: UUID = await connection.fetchval(
        """
        SELECT id
          FROM calculation_request
         WHERE conveyancer_id = $1
         ORDER BY id
         LIMIT 1 OFFSET 100
        """,
        CONVEYANCER,
    )
    return {
        "first page": await _median(connection, Listing(None, 20, _NEWEST)),
        "deep page": await _median(connection, Listing(None, 20, oldest)),
        "by external_id": await _median(connection, Listing("case-7", 20, _NEWEST)),
    }


async def _median(connection: Connection, listing: Listing) -> float:
    milliseconds = []
    for _ in range(_TIMES):
        started_at = time.perf_counter()
        page, _cursor = await read_page(connection, listing, conveyancer_id=CONVEYANCER)
        milliseconds.append(1000 * (time.perf_counter() - started_at))
        assert len(page) == listing.limit
    return statistics.median(milliseconds)


if __name__ == "__main__":
    main()
