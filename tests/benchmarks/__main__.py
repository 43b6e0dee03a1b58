"""Compares the product with other programs, in one run on the same servers: `make bench`."""

import argparse
import sys

import uvloop

from deploy.local.errors import LocalStackError
from tests.benchmarks.comparison import Comparison
from tests.benchmarks.http_load import wrk
from tests.benchmarks.measurements import consumers, create, footprint, latency, reading, relay
from tests.benchmarks.stand import PEERS_PYTHON, open_stand

MEASUREMENTS = {
    "create": create.measure,
    "reading": reading.measure,
    "relay": relay.measure,
    "latency": latency.measure,
    "consumers": consumers.measure,
    "footprint": footprint.measure,
}


def main() -> int:
    """Carry out the chosen measurements and print them. Exit status 1 if a floor is missed."""
    every = list(MEASUREMENTS)
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=3, help="in each of which every side is measured")
    parser.add_argument("--seconds", type=int, default=5, help="of load on an API")
    arguments = parser.parse_args()
    try:
        wrk()
        comparisons = uvloop.run(_measure(arguments))
    except LocalStackError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(line for each in comparisons for line in each.lines()))
    return 0 if all(each.meets(bar) for each in comparisons for bar in each.bars) else 1


async def _measure(arguments: argparse.Namespace) -> list[Comparison]:
    if not PEERS_PYTHON.exists():
        raise LocalStackError("The peers are not installed: use `make bench`.")
    comparisons: list[Comparison] = []
    async with open_stand(rounds=arguments.rounds, seconds=arguments.seconds) as opened:
        for name in arguments.only:
            print(f"{name} …", flush=True)
            comparisons += await MEASUREMENTS[name](opened)
    return comparisons


if __name__ == "__main__":
    sys.exit(main())
