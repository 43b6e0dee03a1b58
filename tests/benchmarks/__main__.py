"""Compares the product with other programs, in one run on the same servers: `make bench`."""

import argparse
import sys
from collections.abc import Awaitable, Callable

import uvloop

from deploy.local.errors import LocalStackError
from tests.benchmarks import report
from tests.benchmarks.comparison import Comparison
from tests.benchmarks.http_load import wrk
from tests.benchmarks.measurements import (
    chain,
    consumers,
    create,
    footprint,
    growth,
    latency,
    reading,
    relay,
)
from tests.benchmarks.stand import Sizes, Stand, ensure_peers, stand

MEASUREMENTS: dict[str, Callable[[Stand], Awaitable[list[Comparison]]]] = {
    "create": create.measure,
    "reading": reading.measure,
    "relay": relay.measure,
    "latency": latency.measure,
    "consumers": consumers.measure,
    "chain": chain.measure,
    "growth": growth.measure,
    "footprint": footprint.measure,
}


def main() -> int:
    """Carry out the chosen measurements and print them. Exit status 1 if a bar is missed."""
    arguments = _parser().parse_args()
    sizes = Sizes(
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        events=arguments.events,
        relay_seconds=arguments.relay_seconds,
        chain_seconds=arguments.chain_seconds,
        rows=arguments.rows,
    )
    try:
        ensure_peers()
        wrk()
        comparisons = uvloop.run(_measure(sizes, arguments.only))
    except LocalStackError as error:
        print(error, file=sys.stderr)
        return 2
    print(report.table(comparisons))
    return 0 if all(met for each in comparisons for _, met in each.bars_met()) else 1


async def _measure(sizes: Sizes, names: list[str]) -> list[Comparison]:
    comparisons: list[Comparison] = []
    async with stand(sizes, print) as opened:
        for name in names:
            print(f"{name} …", flush=True)
            comparisons += await MEASUREMENTS[name](opened)
    return comparisons


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    every = list(MEASUREMENTS)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=3, help="in each of which every side is measured")
    parser.add_argument("--seconds", type=int, default=5, help="of load on an API, for each side and round")
    parser.add_argument("--events", type=int, default=50_000, help="pending when a relay starts")
    parser.add_argument("--relay-seconds", type=float, default=8.0, help="for each side and round, at most")
    parser.add_argument("--chain-seconds", type=float, default=60.0, help="of load on the whole chain")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000], help="stored, for growth")
    return parser


if __name__ == "__main__":
    sys.exit(main())
