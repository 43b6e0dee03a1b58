"""Compares the product with other programs, in one run on the same servers: `make bench`."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import uvloop

from deploy.local.errors import LocalStackError
from tests.benchmarks import consumers, costs, outboxes
from tests.benchmarks.stand import PEERS_PYTHON, Stand, open_stand
from tests.harness.programs import command_of

# Each prints its comparisons, and returns whether each met its bars.
MEASUREMENTS: dict[str, Callable[[Stand], Awaitable[list[bool]]]] = {
    "create": partial(costs.measure_calls, calls=["create"]),
    "reading": partial(costs.measure_calls, calls=["retrieve", "list", "questionnaire"]),
    "relay": outboxes.measure_rate,
    "latency": outboxes.measure_latency,
    "consumers": consumers.measure,
    "footprint": costs.measure_footprint,
}


def main() -> int:
    """Carry out the chosen measurements. Exit status 1 if a floor is missed, 2 if nothing can be measured."""
    every = list(MEASUREMENTS)
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=3, help="in each of which every side is measured")
    parser.add_argument("--seconds", type=int, default=5, help="of load on an API")
    try:
        return 0 if uvloop.run(_measure(**vars(parser.parse_args()))) else 1
    except LocalStackError as error:
        print(error, file=sys.stderr)
        return 2


async def _measure(*, only: list[str], rounds: int, seconds: int) -> bool:
    if not PEERS_PYTHON.exists():
        raise LocalStackError("The peers are not installed: use `make bench`.")
    command_of("wrk", package="wrk")  # Whether it can be downloaded is known first.
    async with open_stand(rounds=rounds, seconds=seconds) as stand:
        met = [is_met for name in only for is_met in await MEASUREMENTS[name](stand)]
    return all(met)


if __name__ == "__main__":
    sys.exit(main())
