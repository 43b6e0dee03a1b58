"""Compares the product with other programs, in one run on the same servers: `make bench`."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
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
from tests.benchmarks.stand import LOCAL, Sizes, Stand, ensure_peers, stand

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
        rows=[*arguments.rows, *([10_000_000] if arguments.huge else [])],
    )
    try:
        ensure_peers()
        wrk(_say)
        versions, comparisons = uvloop.run(_measure_until_signal(sizes, arguments.only))
    except LocalStackError as error:
        print(error, file=sys.stderr)
        return 2
    except asyncio.CancelledError:
        _say("stopped")
        return 130
    _say("")
    for name, version in versions.items():
        _say(f"{name}: {version}")
    _say("")
    _say(report.table(comparisons))
    _write(arguments.folder, versions, comparisons)
    missed = [bar for each in comparisons for bar, met in each.bars_met() if not (met or bar.is_aim)]
    return 1 if missed else 0


async def _measure_until_signal(sizes: Sizes, names: list[str]) -> tuple[dict[str, str], list[Comparison]]:
    """Measure. A signal ends it early, and every process it has started."""
    running = asyncio.ensure_future(_measure(sizes, names))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    return await running


async def _measure(sizes: Sizes, names: list[str]) -> tuple[dict[str, str], list[Comparison]]:
    comparisons: list[Comparison] = []
    async with stand(sizes, _say) as opened:
        versions = dict(await opened.versions())
        for name in names:
            _say(f"{name} …")
            comparisons += await MEASUREMENTS[name](opened)
    return versions, comparisons


def _write(folder: Path, versions: dict[str, str], comparisons: list[Comparison]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written = msgspec.json.encode({"servers": versions, "comparisons": comparisons})
    (folder / "figures.json").write_bytes(msgspec.json.format(written, indent=2) + b"\n")
    _say(f"\nWritten to {folder}: figures.json")


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    every = list(MEASUREMENTS)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=3, help="in each of which every side is measured")
    parser.add_argument("--seconds", type=int, default=5, help="of load on an API, for each side and round")
    parser.add_argument("--events", type=int, default=50_000, help="pending when a relay starts")
    parser.add_argument(
        "--relay-seconds", type=float, default=8.0, help="a relay may take, for each side and round"
    )
    parser.add_argument(
        "--chain-seconds", type=float, default=60.0, help="of load on the whole chain, for each round"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[10_000, 1_000_000], help="of stored requests, for growth"
    )
    parser.add_argument("--huge", action="store_true", help="also measure growth to ten million rows")
    parser.add_argument("--folder", type=Path, default=LOCAL, help="to write figures.json to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
