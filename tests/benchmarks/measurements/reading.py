"""Retrieve, list and questionnaire, each compared with the usual way to write it."""

from functools import partial

from tests.benchmarks import subjects
from tests.benchmarks.comparison import Bar, Comparison
from tests.benchmarks.http_load import load
from tests.benchmarks.measurements.create import ORM, OURS, orm_api
from tests.benchmarks.stand import Stand, compare
from tests.harness.examples import STRUCTURE
from tests.harness.processes import Process

_STORED = 200
FLOORS = {"retrieve": 4.1, "list": 4.0, "questionnaire": 2.5}


async def measure(stand: Stand) -> list[Comparison]:
    async with stand.api(await stand.database("ours")) as ours, orm_api(stand) as theirs:
        apis = {OURS: ours, ORM: theirs}
        paths = {side: await _paths(stand, api) for side, api in apis.items()}
        return [
            await compare(
                name,
                {side: partial(load, stand, api, paths[side][name]) for side, api in apis.items()},
                [Bar(side=ORM, of=OURS, limit=floor)],
                stand,
            )
            for name, floor in FLOORS.items()
        ]


async def _paths(stand: Stand, api: Process) -> dict[str, list[str]]:
    """Store some requests, and return the paths of each measurement."""
    async with stand.client(api) as client:
        retrieve = [f"/v1/request/{await subjects.create(client)}" for _ in range(_STORED)]
    return {"retrieve": retrieve, "list": ["/v1/request?limit=20"], "questionnaire": [STRUCTURE]}
