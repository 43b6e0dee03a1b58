"""Retrieve, list and questionnaire, each compared with the usual way to write it."""

from collections.abc import Sequence

from tests.benchmarks import subjects
from tests.benchmarks.comparison import Bar, Comparison, Figures, compare
from tests.benchmarks.http_load import throughput
from tests.benchmarks.measurements.create import ORM, OURS, orm_api
from tests.benchmarks.stand import Stand
from tests.harness.processes import Process

LIST = "/v1/request?limit=20"
EMPTY = "limit: empty handler"

_STORED = 200
_MORE_ROUNDS = {"questionnaire": 4}  # times as many: its ratio differs by a third from round to round
_BARS = {
    "retrieve": (Bar(side=OURS, of=ORM, limit=4.0),),
    "questionnaire": (
        Bar(side=OURS, of=ORM, limit=5.0),
        Bar(side=OURS, of=EMPTY, limit=0.6, is_aim=True),
    ),
    "list": (),
}


async def measure(stand: Stand) -> list[Comparison]:
    """Retrieve requests, list the latest, and fetch the questionnaire."""
    async with (
        stand.api(await stand.database("ours")) as ours,
        orm_api(stand) as theirs,
        stand.empty_handler() as empty,
    ):
        retrieve = {
            api.base_url: await subjects.create_over_http(stand, api.base_url, _STORED)
            for api in (ours, theirs)
        }
        everywhere = {
            "list": [LIST],
            "questionnaire": [subjects.QUESTIONNAIRE],
        }

        async def read(api: Process, name: str) -> Figures:
            paths: Sequence[str] = everywhere.get(name) or retrieve[api.base_url]
            return await throughput(stand, api.base_url, paths)

        comparisons = []
        for name, bars in _BARS.items():
            sides = {OURS: lambda name=name: read(ours, name)}
            if name != "list":
                sides[ORM] = lambda name=name: read(theirs, name)
            if name == "questionnaire":
                sides[EMPTY] = lambda name=name: read(empty, name)
            rounds = stand.sizes.rounds * _MORE_ROUNDS.get(name, 1)
            comparisons.append(await compare(name, sides, bars, rounds=rounds, settle=stand.settle))
    return comparisons
