"""Footprint: the seconds until a process is ready, and its memory after some load."""

import asyncio

from tests.benchmarks.comparison import Bar, Comparison, Figures
from tests.benchmarks.measurements.create import ORM, create_on, orm_api
from tests.benchmarks.smtp_sink import SmtpSink
from tests.benchmarks.stand import Stand
from tests.harness.processes import Process

API, WORKER = "API", "worker, all roles"
SECONDS, MEGABYTES = "s until ready", "MB after load"

_BARS = [
    Bar(side=side, figure=figure, kind="at most", limit=limit)
    for side in (API, WORKER)
    for figure, limit in ((SECONDS, 1.5), (MEGABYTES, 100.0))
]


async def measure(stand: Stand) -> list[Comparison]:
    """Start each process, put load on it, and read its figures."""
    url = await stand.database("footprint")

    async def api() -> Figures:
        async with stand.api(url) as running:
            await create_on(stand, running)
            return _figures(running)

    async def orm() -> Figures:
        async with orm_api(stand) as running:
            await create_on(stand, running)
            return _figures(running)

    async def worker() -> Figures:
        async with SmtpSink() as sink, stand.worker(url, smtp_url=sink.url) as running:
            await asyncio.sleep(stand.sizes.seconds)  # it relays and mails what the API has stored before
            return _figures(running)

    return [await stand.compare("footprint", {API: api, WORKER: worker, ORM: orm}, _BARS)]


def _figures(running: Process) -> Figures:
    return {SECONDS: running.seconds_to_ready, MEGABYTES: running.rss_megabytes()}
