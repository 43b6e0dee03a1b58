"""Retrieve, compared with the usual way to write it."""

from functools import partial

from tests.benchmarks import subjects
from tests.benchmarks.comparison import Bar, Comparison, Figures
from tests.benchmarks.http_load import load
from tests.benchmarks.measurements.create import ORM, OURS, orm_api
from tests.benchmarks.stand import Stand, compare
from tests.harness.processes import Process

_STORED = 200


async def measure(stand: Stand) -> list[Comparison]:
    """Retrieve requests for some seconds."""
    async with stand.api(await stand.database("ours")) as ours, orm_api(stand) as theirs:
        sides = {OURS: partial(retrieve_from, stand, ours), ORM: partial(retrieve_from, stand, theirs)}
        return [await compare("retrieve", sides, [Bar(side=OURS, of=ORM, limit=4.0)], stand)]


async def retrieve_from(stand: Stand, api: Process) -> Figures:
    """Store some requests, and retrieve them for some seconds."""
    async with stand.client(api) as client:
        paths = [f"/v1/request/{await subjects.create(client)}" for _ in range(_STORED)]
    return await load(stand, api, paths)
