"""Retrieve, compared with the usual way to write it."""

from tests.benchmarks import subjects
from tests.benchmarks.comparison import Bar, Comparison, Figures
from tests.benchmarks.http_load import load
from tests.benchmarks.measurements.create import ORM, OURS, orm_api
from tests.benchmarks.stand import Stand
from tests.harness.processes import Process

_BARS = (Bar(side=OURS, of=ORM, limit=4.0),)


async def measure(stand: Stand) -> list[Comparison]:
    """Retrieve requests for some seconds."""
    async with stand.api(await stand.database("ours")) as ours, orm_api(stand) as theirs:
        sides = {OURS: lambda: retrieve_from(stand, ours), ORM: lambda: retrieve_from(stand, theirs)}
        return [await stand.compare("retrieve", sides, _BARS)]


async def retrieve_from(stand: Stand, api: Process) -> Figures:
    """Store some requests, and retrieve them for some seconds."""
    paths = await subjects.create_over_http(stand, api.base_url)
    return await load(stand, api.base_url, paths)
