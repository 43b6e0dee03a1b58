"""Compares this tree with an earlier commit, in turn: `python -m tests.benchmarks.before COMMIT`.

The earlier tree is used only through its programs and settings: `python -m service schema apply`,
`conveyancer add` and `serve`, `python -m worker relay`. None of its modules are imported, so their layout may
differ. The table `outbox` and the topology on RabbitMQ must be those of this tree.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import uvloop

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.processes import run_command
from tests.benchmarks import outboxes, report, subjects
from tests.benchmarks.comparison import Bar, Comparison, Figures, compare
from tests.benchmarks.http_load import P50, P99, load, throughput, wrk
from tests.benchmarks.measurements.latency import Arrivals
from tests.benchmarks.measurements.relay import drained
from tests.benchmarks.stand import LOCAL, Sizes, Stand, stand
from tests.harness.processes import Process

NOW, BEFORE = "now", "before"

_WORKTREE = LOCAL / "before"
_STORED = 200
_RATE = 100  # requests a second, for the latency
_FASTER = Bar(side=NOW, of=BEFORE, limit=0.95)
_SOONER = tuple(Bar(side=NOW, of=BEFORE, figure=each, kind="at most", limit=1 / 0.95) for each in (P50, P99))


def main() -> int:
    """Measure both trees and print the figures. Exit status 1 if this tree is slower."""
    arguments = _parser().parse_args()
    sizes = Sizes(
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        events=arguments.events,
        relay_seconds=60.0,
        rows=[],
    )
    try:
        wrk()
        with _worktree(arguments.commit) as before:
            comparisons = uvloop.run(_measure(sizes, {NOW: CHECKOUT, BEFORE: before}))
    except LocalStackError as error:
        print(error, file=sys.stderr)
        return 2
    print(report.table(comparisons))
    return 0 if all(met for each in comparisons for _, met in each.bars_met()) else 1


@contextmanager
def _worktree(commit: str) -> Iterator[Path]:
    """Check *commit* out in a worktree, until the block is left."""
    _git("worktree", "remove", "--force", str(_WORKTREE), missing_is_fine=True)
    _git("worktree", "add", "--detach", str(_WORKTREE), commit)
    try:
        yield _WORKTREE
    finally:
        _git("worktree", "remove", "--force", str(_WORKTREE))


def _git(*arguments: str, missing_is_fine: bool = False) -> None:
    try:
        run_command("git", ["git", *arguments], environment=os.environ, folder=CHECKOUT, seconds=60.0)
    except LocalStackError:
        if not missing_is_fine:
            raise


async def _measure(sizes: Sizes, trees: dict[str, Path]) -> list[Comparison]:
    async with stand(sizes, print) as opened:
        return [
            *await _measure_http(opened, trees),
            await _measure_relay(opened, trees),
            await _measure_latency(opened, trees),
        ]


async def _measure_http(stand: Stand, trees: dict[str, Path]) -> list[Comparison]:
    """Measure in a new process each time: two processes of one tree differ by 10 % and more."""
    urls = {tree: await stand.database(tree, checkout=checkout) for tree, checkout in trees.items()}

    @asynccontextmanager
    async def warm_api(tree: str) -> AsyncIterator[Process]:
        async with stand.api(urls[tree], trees[tree]) as api:
            await load(stand, api.base_url, ["/v1/request"], body=subjects.JSON_BODY, seconds=1)
            yield api

    async def create(tree: str) -> Figures:
        async with warm_api(tree) as api:
            return await throughput(stand, api.base_url, ["/v1/request"], body=subjects.JSON_BODY)

    async def retrieve(tree: str) -> Figures:
        async with warm_api(tree) as api:
            paths = await subjects.create_over_http(stand, api.base_url, _STORED)
            return await throughput(stand, api.base_url, paths)

    return [
        await compare(
            measure.__name__,
            {tree: partial(measure, tree) for tree in trees},
            (_FASTER,),
            rounds=stand.sizes.rounds,
            settle=stand.settle,
        )
        for measure in (create, retrieve)
    ]


async def _measure_relay(stand: Stand, trees: dict[str, Path]) -> Comparison:
    async def relay(tree: str) -> Figures:
        url = await stand.database(f"{tree} relay", checkout=trees[tree])
        runs = outboxes.our_relays(stand, checkout=trees[tree])
        async with stand.connected(url) as connection:
            await outboxes.OURS.refill(connection, stand.sizes.events)
            return await drained(stand, runs(url), connection, outboxes.OURS.pending)

    return await compare(
        "relay",
        {tree: partial(relay, tree) for tree in trees},
        (_FASTER,),
        rounds=stand.sizes.rounds,
        settle=stand.settle,
    )


async def _measure_latency(stand: Stand, trees: dict[str, Path]) -> Comparison:
    """Store requests at a steady rate, and time from each answer to the arrival of its event."""

    async def latency(tree: str) -> Figures:
        url = await stand.database(f"{tree} latency", checkout=trees[tree])
        async with (
            Arrivals.watched(stand) as arrivals,
            stand.worker(url, "relay", checkout=trees[tree]),
            stand.api(url, trees[tree]) as api,
        ):
            await _store_steadily(stand, api, arrivals, seconds=1)
            await arrivals.complete()
            arrivals.forget()
            await _store_steadily(stand, api, arrivals, seconds=stand.sizes.seconds)
            await arrivals.complete()
        return {name: value for name, value in arrivals.figures().items() if name in {P50, P99}}

    return await compare(
        f"answer to consumer, {_RATE} a second",
        {tree: partial(latency, tree) for tree in trees},
        _SOONER,
        rounds=stand.sizes.rounds,
        settle=stand.settle,
    )


async def _store_steadily(stand: Stand, api: Process, arrivals: Arrivals, *, seconds: int) -> None:
    headers = {"Authorization": f"Bearer {stand.token}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=api.base_url, headers=headers, timeout=10.0) as client:

        async def store() -> None:
            response = await client.post("/v1/request", content=subjects.JSON_BODY)
            response.raise_for_status()
            arrivals.committed[response.json()["data"]["uuid"]] = time.monotonic()

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(_RATE * seconds):
                await asyncio.sleep(max(0.0, began + number / _RATE - time.monotonic()))
                group.create_task(store())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.before", description=__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which both trees are measured")
    parser.add_argument("--seconds", type=int, default=5, help="of load, for each tree and round")
    parser.add_argument("--events", type=int, default=50_000, help="pending when a relay starts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
