"""Create: POST /v1/request, compared with the usual way to write it, and with Postgres alone."""

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from uuid import UUID

from yarl import URL

from deploy.local.servers.postgres_process import postgres_programs
from tests.benchmarks import subjects
from tests.benchmarks.comparison import PER_SECOND, Bar, Comparison, Figures
from tests.benchmarks.http_load import CONNECTIONS, create_on
from tests.benchmarks.stand import POOL_SIZE, Stand, compare
from tests.harness.examples import CONVEYANCER
from tests.harness.processes import Process

OURS, ORM, _PGBENCH = "ours", "FastAPI + ORM", "limit: pgbench"

_FLOORS = (Bar(side=ORM, of=OURS, limit=5.0),)


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
        sides = {
            OURS: partial(create_on, stand, ours),
            ORM: partial(create_on, stand, theirs),
            _PGBENCH: partial(_pgbench, stand, URL(await stand.database("limit"))),
        }
        return [await compare("create", sides, _FLOORS, stand)]


async def _pgbench(stand: Stand, url: URL) -> Figures:
    """Run the statement in pgbench, prepared, with as many clients as the API has connections."""
    script, variables = _script(subjects.create_statement())
    (stand.folder / "create.sql").write_text(script)
    command = [
        shutil.which("pgbench") or postgres_programs() / "pgbench",
        *("--no-vacuum", "--protocol", "prepared", "--client", str(CONNECTIONS), "--jobs", "1"),
        *("--time", str(stand.seconds), "--file", stand.folder / "create.sql"),
        *(f"--define={name}={value}" for name, value in variables.items()),
        *("--host", url.host or "", "--port", str(url.port), "--username", url.user or "", url.path[1:]),
    ]
    seconds = stand.seconds + 30
    output = await stand.run("pgbench", command, seconds=seconds, PGPASSWORD=url.password or "")
    return {PER_SECOND: float(re.findall(r"^tps = ([0-9.]+)", output, re.MULTILINE)[0])}


def _script(statement: subjects.Statement) -> tuple[str, dict[str, str]]:
    """Return the statement as a script of pgbench that stores a new request each time, and its variables."""
    variables: dict[str, str] = {}

    def argument(match: re.Match[str]) -> str:
        value = statement.arguments[int(match[1]) - 1]
        if isinstance(value, UUID):
            return "uuidv7()"
        if value is None:
            return "NULL"
        name = f"a{match[1]}"
        variables[name] = rf"\x{value.hex()}" if isinstance(value, bytes) else str(value)
        return f":{name}"

    return re.sub(r"\$(\d+)", argument, statement.text), variables
