"""Compares this tree with an earlier commit, in turn: `python -m tests.benchmarks.before COMMIT`.

The earlier tree is used only through its programs and settings: `python -m service schema apply`,
`conveyancer add` and `serve`, `python -m worker`. None of its modules are imported, so their layout may
differ. It has servers and Python packages of its own, so its schema, its topology on RabbitMQ and its locks
may differ, too. Common to both are the queues' names, and the columns that are read and filled here.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from deploy.local.machine.folders import CHECKOUT, Place, working_folder
from deploy.local.machine.processes import run_command
from tests.benchmarks import subjects
from tests.benchmarks.__main__ import run
from tests.benchmarks.comparison import P50, Bar, Comparison, Figures
from tests.benchmarks.http_load import create_on
from tests.benchmarks.measurements import consumers
from tests.benchmarks.measurements.latency import arrivals
from tests.benchmarks.measurements.reading import retrieve_from
from tests.benchmarks.measurements.relay import relay
from tests.benchmarks.outboxes import OURS
from tests.benchmarks.rate import call_steadily
from tests.benchmarks.smtp_sink import SmtpSink
from tests.benchmarks.stand import LOCAL, Sizes, Stand, Tree, compare, stand
from tests.harness import databases
from tests.harness.processes import Process

NOW, BEFORE = "now", "before"
API_MEMORY, WORKER_MEMORY = "MB of the API", "MB of the worker"

_ENVIRONMENT = LOCAL / "before-environment"  # kept: the next run installs only what differs
_INSTALL_SECONDS = 900.0
_RATES = (1, 100, 300)  # requests a second, for the latency
_CONSUMED = 6_000  # messages, for each tree and round

Measure = Callable[[Stand], Awaitable[Figures]]


def main() -> int:
    """Measure both trees and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.before", description=__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which both trees are measured")
    parser.add_argument("--seconds", type=int, default=5, help="of load, for each tree and round")
    parser.add_argument("--only", nargs="*", default=[], help="e.g. create, e-mails, latency or memory")
    arguments = parser.parse_args()
    sizes = Sizes(rounds=arguments.rounds, seconds=arguments.seconds)
    return run(_measure_all(sizes, arguments.commit, arguments.only))


@contextmanager
def _checked_out(commit: str) -> Iterator[Tree]:
    """Yield the tree of *commit*, with the packages that it locks."""
    with working_folder(Place(folder=LOCAL), "before") as folder:
        _run("sh", "-euc", 'git archive "$1" | tar -x -C "$2"', "sh", commit, str(folder))
        print(f"Installing the packages of {commit} into {_ENVIRONMENT} …")
        _run(f"{folder}/deploy/local/install", sys.executable, str(_ENVIRONMENT))
        yield Tree(folder, str(_ENVIRONMENT / "bin" / "python"))


def _run(*command: str) -> None:
    run_command(command[0], command, folder=CHECKOUT, seconds=_INSTALL_SECONDS)


async def _measure_all(sizes: Sizes, commit: str, only: list[str]) -> list[Comparison]:
    at_least = partial(Bar, side=NOW, of=BEFORE)
    at_most = partial(Bar, side=NOW, of=BEFORE, kind="at most", limit=1.0)
    measurements: dict[str, tuple[Measure, list[Bar]]] = {
        "create": (partial(_on_warm_api, create_on), [at_least(limit=0.85)]),
        "retrieve": (partial(_on_warm_api, retrieve_from), [at_least(limit=0.90)]),
        "relay": (partial(relay, OURS), [at_least(limit=0.90)]),
        "e-mails": (partial(_consume, consumers.send_emails), [at_least(limit=0.85)]),
        "calculations": (partial(_consume, consumers.record_calculations), [at_least(limit=0.80)]),
        **{
            f"latency at {rate} a second": (partial(_latency, rate), [at_most(figure=P50)]) for rate in _RATES
        },
        "memory": (_memory, [at_most(figure=API_MEMORY), at_most(figure=WORKER_MEMORY)]),
    }
    with _checked_out(commit) as tree:
        async with stand(sizes) as now, stand(sizes, name="run-before", tree=tree) as before:
            stands = {NOW: now, BEFORE: before}
            for each in stands.values():
                async with each.worker(await each.database("topology")):
                    pass  # Once it is ready, it has declared its queues.

            return [
                await compare(
                    name,
                    {side: partial(measure, each) for side, each in stands.items()},
                    bars,
                    *stands.values(),
                )
                for name, (measure, bars) in measurements.items()
                if not only or name.split()[0] in only
            ]


async def _on_warm_api(measure: Callable[[Stand, Process], Awaitable[Figures]], stand: Stand) -> Figures:
    """Measure a new process: two processes of one tree differ by 10 % and more."""
    async with stand.api(await stand.database("http")) as api:
        await create_on(stand, api, seconds=1)
        return await measure(stand, api)


async def _consume(handle: consumers.Handle, stand: Stand) -> Figures:
    """Store enough requests over HTTP, and have a worker handle the messages that they cause."""
    url = await stand.database("consumers")
    async with databases.connected(url) as connection:
        await consumers.empty(connection)
        async with stand.api(url) as api:
            while await connection.fetchval("SELECT count(*) FROM calculation_request") < _CONSUMED:
                await create_on(stand, api, seconds=1)
        return await handle(stand, url, connection, _CONSUMED)


async def _latency(rate: int, stand: Stand) -> Figures:
    """Store requests at a steady rate, and time from each answer to the arrival of its event."""
    url = await stand.database("latency")
    async with (
        arrivals(stand) as waits,
        stand.worker(url, "relay"),
        stand.api(url) as api,
        stand.client(api) as client,
    ):

        async def store(_: float) -> None:
            uuid = await subjects.create(client)
            waits.began[uuid] = time.monotonic()

        await call_steadily(store, rate=rate, seconds=1)
        await waits.complete()
        waits.forget()
        await call_steadily(store, rate=rate, seconds=stand.sizes.seconds)
        await waits.complete()
    return waits.figures()


async def _memory(stand: Stand) -> Figures:
    """Create, relay and e-mail for some seconds; then read the memory of both processes."""
    url = await stand.database("memory")
    async with SmtpSink() as sink, stand.worker(url, smtp_url=sink.url) as worker, stand.api(url) as api:
        await create_on(stand, api)
        await asyncio.sleep(stand.sizes.seconds)  # The worker goes on with what is stored.
        return {API_MEMORY: api.rss_megabytes(), WORKER_MEMORY: worker.rss_megabytes()}


if __name__ == "__main__":
    sys.exit(main())
