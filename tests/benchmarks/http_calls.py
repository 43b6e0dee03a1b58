"""The API, compared with the usual way to write it. wrk, in C, makes the load: it shares the processors."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx

from deploy.local.errors import LocalStackError
from tests.benchmarks.stand import PER_SECOND, POOL_SIZE, Bar, Figures, Stand, peer_command
from tests.benchmarks.subjects import JSON_BODY
from tests.harness.examples import CONVEYANCER, STRUCTURE
from tests.harness.processes import Process
from tests.harness.programs import command_of

FLOORS = {"create": 5.2, "retrieve": 4.1, "list": 4.0, "questionnaire": 2.5}

_OURS, _ORM = "ours", "FastAPI + ORM"
_REQUESTS = "/v1/request"
_STORED = 200  # requests that are retrieved in turn
_SENT = re.compile(r"^ +([0-9]+) requests in .*^Requests/sec: +([0-9.]+)$", re.MULTILINE | re.DOTALL)


def wrk() -> list[str]:
    """Return the command that runs wrk, downloaded if it is missing. Raises LocalStackError."""
    return command_of("wrk", package="wrk")


async def measure_create(stand: Stand) -> list[bool]:
    return await _measure(stand, ["create"])


async def measure_reading(stand: Stand) -> list[bool]:
    return await _measure(stand, ["retrieve", "list", "questionnaire"])


async def _measure(stand: Stand, calls: Sequence[str]) -> list[bool]:
    url = await stand.database("orm", with_schema=False)
    settings = {"POOL_SIZE": str(POOL_SIZE), "TENANT": CONVEYANCER}
    orm = stand.running("fastapi_orm", peer_command("fastapi_orm"), url, settings=settings)
    async with stand.api(await stand.database("ours")) as ours, orm as theirs:
        sides = {_OURS: ours, _ORM: theirs}
        for api in sides.values():
            await create_on(stand, api, seconds=1)
        paths = {side: await _paths(stand, api) for side, api in sides.items()}
        return [
            await stand.compare(
                call,
                {
                    side: partial(create_on, stand, api)
                    if call == "create"
                    else partial(_load, stand, api, paths[side][call])
                    for side, api in sides.items()
                },
                [Bar(side=_ORM, of=_OURS, limit=FLOORS[call])],
            )
            for call in calls
        ]


async def _paths(stand: Stand, api: Process) -> dict[str, list[str]]:
    """Store some requests, and return the paths of each call."""
    headers = {"Authorization": f"Bearer {stand.token}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=api.base_url, headers=headers, timeout=10.0) as client:
        answers = [await client.post(_REQUESTS, content=JSON_BODY) for _ in range(_STORED)]
    retrieve = [f"{_REQUESTS}/{answer.json()['data']['uuid']}" for answer in answers]
    return {"retrieve": retrieve, "list": [f"{_REQUESTS}?limit=20"], "questionnaire": [STRUCTURE]}


async def create_on(stand: Stand, api: Process, *, seconds: int | None = None) -> Figures:
    return await _load(stand, api, [_REQUESTS], body=JSON_BODY, seconds=seconds)


async def _load(
    stand: Stand, api: Process, paths: Sequence[str], *, body: bytes = b"", seconds: int | None = None
) -> Figures:
    """Send GETs of *paths*, or POSTs of *body*, over 32 connections; return how many a second are answered.

    Also returns the processor time of one. A failed request is an error.
    """
    seconds = seconds or stand.seconds
    (stand.folder / "paths").write_text("".join(f"{path}\n" for path in paths))
    (stand.folder / "body").write_bytes(body)
    command = [
        *(*wrk(), "--threads", "1", "--connections", "32", "--duration", f"{seconds}s", "--timeout", "10s"),
        *("--script", str(Path(__file__).with_name("load.lua")), api.base_url, "--"),
        *(str(stand.folder / "paths"), str(stand.folder / "body"), stand.token),
    ]
    costs = stand.meter(api)
    output = await stand.run("wrk", command, seconds=seconds + 20)
    sent = _SENT.search(output)
    if sent is None or "Non-2xx" in output or "Socket errors" in output:
        raise LocalStackError(f"Requests to {api.base_url} failed: {output}")
    return {PER_SECOND: float(sent[2]), **costs(int(sent[1]))}
