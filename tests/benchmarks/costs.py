"""HTTP calls, compared with the usual way to write them; start and memory."""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx
import msgspec

from deploy.local.errors import LocalStackError
from tests.benchmarks.stand import BODY, PER_SECOND, POOL_SIZE, Bar, Figures, Stand, peer_command
from tests.harness.examples import CONVEYANCER, STRUCTURE
from tests.harness.mail_server import ScriptedMailServer
from tests.harness.processes import Process
from tests.harness.programs import command_of

FLOORS = {"create": 5.2, "retrieve": 4.1, "list": 4.0, "questionnaire": 2.5}

_STARTED, _MEGABYTES = "s until ready", "MB after load"
_OURS, _ORM = "ours", "FastAPI + ORM"
REQUESTS = "/v1/request"
_JSON_BODY = msgspec.json.encode(BODY)
_STORED = 200  # requests that are retrieved in turn
_SENT = re.compile(r"^ +([0-9]+) requests in .*^Requests/sec: +([0-9.]+)$", re.MULTILINE | re.DOTALL)


async def measure_calls(stand: Stand, *, calls: Sequence[str]) -> list[bool]:
    url = await stand.database("orm", with_schema=False)
    settings = {"POOL_SIZE": str(POOL_SIZE), "TENANT": CONVEYANCER}
    orm = stand.running("fastapi_orm", peer_command("fastapi_orm"), url, settings=settings)
    async with stand.api(await stand.database("ours")) as ours, orm as theirs:
        sides = {_OURS: ours, _ORM: theirs}
        for api in sides.values():
            await load(stand, api, [REQUESTS], seconds=1)
        paths = {side: await _paths(stand, api) for side, api in sides.items()}
        return [
            await stand.compare(
                call,
                {side: partial(load, stand, api, paths[side][call]) for side, api in sides.items()},
                [Bar(side=_ORM, of=_OURS, limit=FLOORS[call])],
            )
            for call in calls
        ]


async def _paths(stand: Stand, api: Process) -> dict[str, list[str]]:
    """Store some requests, and return the paths of each call."""
    headers = {"Authorization": f"Bearer {stand.token}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=api.base_url, headers=headers, timeout=10.0) as client:
        answers = [await client.post(REQUESTS, content=_JSON_BODY) for _ in range(_STORED)]
    retrieve = [f"{REQUESTS}/{answer.json()['data']['uuid']}" for answer in answers]
    lists = [f"{REQUESTS}?limit=20"]
    return {"create": [REQUESTS], "retrieve": retrieve, "list": lists, "questionnaire": [STRUCTURE]}


async def load(stand: Stand, api: Process, paths: Sequence[str], *, seconds: int | None = None) -> Figures:
    """Send GETs of *paths*, or creates, over 32 connections. Returns rate and cost. A failure is an error."""
    seconds = seconds or stand.seconds
    (stand.folder / "paths").write_text("".join(f"{path}\n" for path in paths))
    (stand.folder / "body").write_bytes(_JSON_BODY if paths == [REQUESTS] else b"")
    command = [
        *command_of("wrk", package="wrk"),
        *("--threads", "1", "--connections", "32", "--duration", f"{seconds}s", "--timeout", "10s"),
        *("--script", str(Path(__file__).with_name("load.lua")), api.base_url, "--"),
        *(str(stand.folder / "paths"), str(stand.folder / "body"), stand.token),
    ]
    costs = stand.meter(api)
    output = await stand.run("wrk", command, seconds=seconds + 20)
    sent = _SENT.search(output)
    if sent is None or sent[1] == "0" or "Non-2xx" in output or "Socket errors" in output:
        raise LocalStackError(f"Requests to {api.base_url} failed: {output}")
    return {PER_SECOND: float(sent[2]), **costs(int(sent[1]))}


async def measure_footprint(stand: Stand) -> list[bool]:
    url = await stand.database("footprint")

    def figures(running: Process) -> Figures:
        return {_STARTED: running.seconds_to_ready, _MEGABYTES: running.rss_megabytes()}

    async def api() -> Figures:
        async with stand.api(url) as running:
            await load(stand, running, [REQUESTS])
            return figures(running)

    async def worker() -> Figures:
        async with ScriptedMailServer() as mail:
            async with stand.worker(url, ready=True, settings={"SMTP_URL": mail.url}) as running:
                await asyncio.sleep(stand.seconds)  # it relays and mails what the API has stored before
                measured = figures(running)
            if not mail.contents:
                raise LocalStackError("The worker sent no e-mail, so its memory shows nothing.")
            return measured

    bars = [Bar(side="API", figure=_MEGABYTES, kind="at most", limit=100.0)]
    bars.append(Bar(side="worker, all roles", figure=_MEGABYTES, kind="at most", limit=80.0))
    return [await stand.compare("footprint", {"API": api, "worker, all roles": worker}, bars)]
