"""Create: POST /v1/request, compared with the usual way to write it, and with Postgres alone."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from yarl import URL

from deploy.local.errors import LocalStackError
from deploy.local.servers.postgres_process import postgres_programs
from tests.benchmarks import subjects
from tests.benchmarks.comparison import PER_SECOND, Bar, Comparison, Figures
from tests.benchmarks.http_load import CONNECTIONS, load
from tests.benchmarks.stand import POOL_SIZE, Stand
from tests.harness.examples import CONVEYANCER
from tests.harness.processes import Process

OURS, ORM, LIMIT = "ours", "FastAPI + ORM", "limit: pgbench"

_BARS = (Bar(side=OURS, of=ORM, limit=6.0), Bar(side=OURS, of=LIMIT, limit=0.3))


@asynccontextmanager
async def orm_api(stand: Stand) -> AsyncIterator[Process]:
    """Run the API written the usual way: FastAPI and an ORM."""
    url = await stand.database("orm", with_schema=False)
    settings = {"DATABASE_URL": url, "POOL_SIZE": str(POOL_SIZE), "TENANT": CONVEYANCER}
    async with stand.peer("fastapi_orm", ready=True, **settings) as running:
        yield running


async def create_on(stand: Stand, api: Process, *, seconds: int | None = None) -> Figures:
    """Store requests for some seconds over HTTP."""
    return await load(stand, api.base_url, ["/v1/request"], body=subjects.JSON_BODY, seconds=seconds)


async def measure(stand: Stand) -> list[Comparison]:
    """Store requests for some seconds: over HTTP in both APIs, and from pgbench without an API."""
    statement = await subjects.create_statement()
    limit_url = await stand.database("limit")
    async with stand.api(await stand.database("ours")) as ours, orm_api(stand) as theirs:
        for api in (ours, theirs):
            await create_on(stand, api, seconds=1)
        sides = {
            OURS: lambda: create_on(stand, ours),
            ORM: lambda: create_on(stand, theirs),
            LIMIT: lambda: _pgbench(stand, limit_url, statement),
        }
        return [await stand.compare("create", sides, _BARS)]


async def _pgbench(stand: Stand, database_url: str, statement: subjects.Statement) -> Figures:
    """Run the statement in pgbench, prepared, with as many clients as the API has connections."""
    script, variables = _script(statement)
    (stand.folder / "create.sql").write_text(script)
    url = URL(database_url)
    process = await asyncio.create_subprocess_exec(
        shutil.which("pgbench") or str(postgres_programs() / "pgbench"),
        *("--no-vacuum", "--protocol", "prepared", "--client", str(CONNECTIONS), "--jobs", "1"),
        *("--time", str(stand.sizes.seconds), "--file", str(stand.folder / "create.sql")),
        *(option for name, value in variables.items() for option in ("--define", f"{name}={value}")),
        *("--host", url.host or "", "--port", str(url.port), "--username", url.user or "", url.path[1:]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PGPASSWORD": url.password or ""},
    )
    output, _ = await process.communicate()
    rate = re.search(r"^tps = ([0-9.]+)", output.decode(), re.MULTILINE)
    if process.returncode != 0 or rate is None:
        raise LocalStackError(f"pgbench failed: {output.decode()}")
    return {PER_SECOND: float(rate[1])}


def _script(statement: subjects.Statement) -> tuple[str, dict[str, str]]:
    """Return the statement as a script of pgbench that stores a new request each time, and its variables."""
    variables: dict[str, str] = {}

    def argument(match: re.Match[str]) -> str:
        number = int(match[1])
        value = statement.arguments[number - 1]
        if isinstance(value, UUID):
            return "uuidv7()"
        if value is None:
            return "NULL"
        variables[f"a{number}"] = _text(value)
        return f":a{number}"

    return re.sub(r"\$(\d+)", argument, statement.text), variables


def _text(value: Any) -> str:
    match value:
        case bytes():
            return rf"\x{value.hex()}"
        case datetime():
            return value.isoformat()
        case _:
            return str(value)
