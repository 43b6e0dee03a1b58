"""Compares the product with other programs, in one run on the same servers: `make bench`."""

import argparse
import sys
from collections.abc import Coroutine
from typing import Any

import uvloop

from deploy.local.errors import LocalStackError
from tests.benchmarks.comparison import Comparison
from tests.benchmarks.http_load import wrk
from tests.benchmarks.measurements import chain, consumers, create, footprint, growth, latency, reading, relay
from tests.benchmarks.stand import PEERS_PYTHON, Sizes, stand

MEASUREMENTS = {
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
    """Carry out the chosen measurements and print them."""
    every = list(MEASUREMENTS)
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=3, help="in each of which every side is measured")
    parser.add_argument("--seconds", type=int, default=5, help="of load on an API; the chain: twelve times")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000], help="stored, for growth")
    arguments = parser.parse_args()
    sizes = Sizes(rounds=arguments.rounds, seconds=arguments.seconds, rows=arguments.rows)
    return run(_measure(sizes, arguments.only))


def run(measuring: Coroutine[Any, Any, list[Comparison]]) -> int:
    """Measure, and print the figures. Exit status 1 if a bar is missed."""
    try:
        wrk()
        comparisons = uvloop.run(measuring)
    except LocalStackError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(line for each in comparisons for line in each.lines()))
    return 0 if all(each.meets(bar) for each in comparisons for bar in each.bars) else 1


async def _measure(sizes: Sizes, names: list[str]) -> list[Comparison]:
    if not PEERS_PYTHON.exists():
        raise LocalStackError("The peers are not installed: use `make bench`.")
    comparisons: list[Comparison] = []
    async with stand(sizes) as opened:
        for name in names:
            print(f"{name} …", flush=True)
            comparisons += await MEASUREMENTS[name](opened)
    return comparisons


if __name__ == "__main__":
    sys.exit(main())
