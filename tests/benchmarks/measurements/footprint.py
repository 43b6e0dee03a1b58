"""Footprint: the seconds until a process is ready, and its memory after some load."""

import asyncio

from deploy.local.errors import LocalStackError
from tests.benchmarks.comparison import Bar, Comparison, Figures
from tests.benchmarks.http_load import create_on
from tests.benchmarks.stand import Stand, compare
from tests.harness.mail_server import ScriptedMailServer
from tests.harness.processes import Process

_API, _WORKER = "API", "worker, all roles"
_SECONDS, _MEGABYTES = "s until ready", "MB after load"
_LIMITS = [
    Bar(side=side, figure=_MEGABYTES, kind="at most", limit=limit)
    for side, limit in ((_API, 100.0), (_WORKER, 80.0))
]


async def measure(stand: Stand) -> list[Comparison]:
    url = await stand.database("footprint")

    async def api() -> Figures:
        async with stand.api(url) as running:
            await create_on(stand, running)
            return _figures(running)

    async def worker() -> Figures:
        async with ScriptedMailServer() as mail, stand.worker(url, smtp_url=mail.url) as running:
            await asyncio.sleep(stand.seconds)  # it relays and mails what the API has stored before
            if not mail.contents:
                raise LocalStackError("The worker sent no e-mail, so its memory shows nothing.")
            return _figures(running)

    return [await compare("footprint", {_API: api, _WORKER: worker}, _LIMITS, stand)]


def _figures(running: Process) -> Figures:
    return {_SECONDS: running.seconds_to_ready, _MEGABYTES: running.rss_megabytes()}
