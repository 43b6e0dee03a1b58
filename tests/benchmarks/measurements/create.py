"""Create: POST /v1/request, compared with the usual way to write it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from tests.benchmarks.comparison import Bar, Comparison
from tests.benchmarks.http_load import create_on
from tests.benchmarks.stand import POOL_SIZE, Stand, compare
from tests.harness.examples import CONVEYANCER
from tests.harness.processes import Process

OURS, ORM = "ours", "FastAPI + ORM"

_FLOOR = Bar(side=ORM, of=OURS, limit=5.2)


@asynccontextmanager
async def orm_api(stand: Stand) -> AsyncIterator[Process]:
    url = await stand.database("orm", with_schema=False)
    settings = {"DATABASE_URL": url, "POOL_SIZE": str(POOL_SIZE), "TENANT": CONVEYANCER}
    async with stand.peer("fastapi_orm", ready=True, **settings) as running:
        yield running


async def measure(stand: Stand) -> list[Comparison]:
    async with stand.api(await stand.database("ours")) as ours, orm_api(stand) as theirs:
        for api in (ours, theirs):
            await create_on(stand, api, seconds=1)
        sides = {OURS: partial(create_on, stand, ours), ORM: partial(create_on, stand, theirs)}
        return [await compare("create", sides, [_FLOOR], stand)]
