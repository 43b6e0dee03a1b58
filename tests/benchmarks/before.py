"""Compares this tree with an earlier commit, in turn: `python -m tests.benchmarks.before COMMIT`.

The earlier tree is used only through its programs and settings: `python -m service schema apply`,
`conveyancer add` and `serve`, `python -m worker`. None of its modules are imported, so their layout may
differ. It has servers and Python packages of its own, so its schema, its topology on RabbitMQ and its locks
may differ, too. Common to both are the queues' names, and the columns that are read and filled here.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import uvloop

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.processes import run_command
from service.identifiers import uuid_of
from service.postgres.pool import Connection
from tests.benchmarks import outboxes, report, subjects
from tests.benchmarks.comparison import Bar, Comparison, Figures, compare
from tests.benchmarks.http_load import P50, wrk
from tests.benchmarks.measurements import consumers
from tests.benchmarks.measurements.create import create_on
from tests.benchmarks.measurements.latency import Arrivals
from tests.benchmarks.measurements.reading import retrieve_from
from tests.benchmarks.measurements.relay import drained
from tests.benchmarks.smtp_sink import SmtpSink
from tests.benchmarks.stand import LOCAL, Sizes, Stand, Tree, stand
from tests.harness.processes import Process

NOW, BEFORE = "now", "before"
API_MEMORY, WORKER_MEMORY = "MB of the API", "MB of the worker"

_WORKTREE = LOCAL / "before"
_ENVIRONMENT = LOCAL / "before-environment"  # kept: the next run installs only what differs
_INSTALL_SECONDS = 900.0
_RATES = (1, 100, 300)  # requests a second, for the latency
_CONSUMED = 6_000  # messages, for each tree and round

Measure = Callable[[Stand], Awaitable[Figures]]


def main() -> int:
    """Measure both trees and print the figures. Exit status 1 if this tree misses a bar."""
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
            comparisons = uvloop.run(_measure_all(sizes, before, arguments.only))
    except LocalStackError as error:
        print(error, file=sys.stderr)
        return 2
    print(report.table(comparisons))
    return 0 if all(met for each in comparisons for _, met in each.bars_met()) else 1


@contextmanager
def _worktree(commit: str) -> Iterator[Tree]:
    """Check *commit* out in a worktree until the block is left, and install the packages that it locks."""
    _run("git", "worktree", "remove", "--force", str(_WORKTREE), missing_is_fine=True)
    _run("git", "worktree", "add", "--detach", str(_WORKTREE), commit)
    try:
        print(f"Installing the packages of {commit} into {_ENVIRONMENT} …")
        _run(f"{_WORKTREE}/deploy/local/install", sys.executable, str(_ENVIRONMENT))
        yield Tree(_WORKTREE, str(_ENVIRONMENT / "bin" / "python"))
    finally:
        _run("git", "worktree", "remove", "--force", str(_WORKTREE))


def _run(*command: str, missing_is_fine: bool = False) -> None:
    try:
        run_command(
            Path(command[0]).name,
            list(command),
            environment=os.environ,
            folder=CHECKOUT,
            seconds=_INSTALL_SECONDS,
        )
    except LocalStackError:
        if not missing_is_fine:
            raise


async def _measure_all(sizes: Sizes, before: Tree, only: list[str]) -> list[Comparison]:
    at_least = partial(Bar, side=NOW, of=BEFORE)
    at_most = partial(Bar, side=NOW, of=BEFORE, kind="at most", limit=1.0)
    measurements: dict[str, tuple[Measure, list[Bar]]] = {
        "create": (_create, [at_least(limit=0.85)]),
        "retrieve": (_retrieve, [at_least(limit=0.90)]),
        "relay": (_relay, [at_least(limit=0.90)]),
        "e-mails": (_emails, [at_least(limit=0.85)]),
        "calculations": (_calculations, [at_least(limit=0.80)]),
        **{
            f"latency at {rate} a second": (partial(_latency, rate), [at_most(figure=P50)]) for rate in _RATES
        },
        "memory": (_memory, [at_most(figure=API_MEMORY), at_most(figure=WORKER_MEMORY)]),
    }
    async with stand(sizes, print) as now, stand(sizes, print, name="run-before", tree=before) as then:
        stands = {NOW: now, BEFORE: then}
        for each in stands.values():
            await _declare_topology(each)

        async def settle() -> None:
            for each in stands.values():
                await each.settle()

        return [
            await compare(
                name,
                {side: partial(measure, each) for side, each in stands.items()},
                bars,
                rounds=sizes.rounds,
                settle=settle,
            )
            for name, (measure, bars) in measurements.items()
            if not only or name.split()[0] in only
        ]


async def _declare_topology(stand: Stand) -> None:
    """Run a worker until it is ready: it has then declared its queues."""
    async with stand.worker(await stand.database("topology")):
        pass


@asynccontextmanager
async def _warm_api(stand: Stand) -> AsyncIterator[Process]:
    """Run a new process: two processes of one tree differ by 10 % and more."""
    async with stand.api(await stand.database("http")) as api:
        await create_on(stand, api, seconds=1)
        yield api


async def _create(stand: Stand) -> Figures:
    async with _warm_api(stand) as api:
        return await create_on(stand, api)


async def _retrieve(stand: Stand) -> Figures:
    async with _warm_api(stand) as api:
        return await retrieve_from(stand, api)


async def _relay(stand: Stand) -> Figures:
    url = await stand.database("relay")
    async with stand.connected(url) as connection:
        await outboxes.OURS.refill(connection, stand.sizes.events)
        relays = outboxes.our_relays(stand)
        return await drained(stand, relays(url), connection, outboxes.OURS.pending)


async def _calculations(stand: Stand) -> Figures:
    url = await stand.database("consumers")
    async with stand.connected(url) as connection:
        uuids = await _store(stand, url, connection)
        return await consumers.record_calculations(stand, url, connection, uuids)


async def _emails(stand: Stand) -> Figures:
    url = await stand.database("consumers")
    async with stand.connected(url) as connection:
        uuids = await _store(stand, url, connection)
    return await consumers.send_emails(stand, url, uuids)


async def _store(stand: Stand, url: str, connection: Connection) -> list[str]:
    """Empty the tables and store requests over HTTP, without their events."""
    await connection.execute("TRUNCATE calculation_request, outbox, outbox_held, email")
    async with stand.api(url) as api:
        while await connection.fetchval("SELECT count(*) FROM calculation_request") < _CONSUMED:
            await create_on(stand, api, seconds=1)
    await connection.execute("TRUNCATE outbox")
    rows = await connection.fetch("SELECT id FROM calculation_request LIMIT $1", _CONSUMED)
    return [uuid_of(row["id"]) for row in rows]


async def _latency(rate: int, stand: Stand) -> Figures:
    """Store requests at a steady rate, and time from each answer to the arrival of its event."""
    url = await stand.database("latency")
    async with (
        Arrivals.watched(stand) as arrivals,
        stand.worker(url, "relay"),
        stand.api(url) as api,
    ):
        await _store_steadily(stand, api, arrivals, rate=rate, seconds=1)
        await arrivals.complete()
        arrivals.forget()
        await _store_steadily(stand, api, arrivals, rate=rate, seconds=stand.sizes.seconds)
        await arrivals.complete()
    return arrivals.figures()


async def _store_steadily(stand: Stand, api: Process, arrivals: Arrivals, *, rate: int, seconds: int) -> None:
    headers = {"Authorization": f"Bearer {stand.token}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=api.base_url, headers=headers, timeout=10.0) as client:

        async def store() -> None:
            response = await client.post("/v1/request", content=subjects.JSON_BODY)
            response.raise_for_status()
            arrivals.committed[response.json()["data"]["uuid"]] = time.monotonic()

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(rate * seconds):
                await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
                group.create_task(store())


async def _memory(stand: Stand) -> Figures:
    """Create, relay and e-mail for some seconds; then read the memory of both processes."""
    url = await stand.database("memory")
    async with SmtpSink() as sink, stand.worker(url, smtp_url=sink.url) as worker, stand.api(url) as api:
        await create_on(stand, api)
        await asyncio.sleep(stand.sizes.seconds)  # The worker goes on with what is stored.
        return {API_MEMORY: api.rss_megabytes(), WORKER_MEMORY: worker.rss_megabytes()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.before", description=__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which both trees are measured")
    parser.add_argument("--seconds", type=int, default=5, help="of load, for each tree and round")
    parser.add_argument("--events", type=int, default=50_000, help="pending when a relay starts")
    parser.add_argument("--only", nargs="*", default=[], help="e.g. create, e-mails, latency or memory")
    return parser


if __name__ == "__main__":
    sys.exit(main())
