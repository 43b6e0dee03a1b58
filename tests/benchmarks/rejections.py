"""How long a refusal takes, compared with an acceptance: `python -m tests.benchmarks.rejections`.

One caller sends every kind of call, in random order, to an API and to one without Postgres. The output has
medians in milliseconds, and their ratio to the median of an accepted create: of an ordinary one, or, for
bodies of the largest size, of the slowest accepted one of that size. The last two lines must not differ:
another conveyancer's request, and one that does not exist. 409 is missing: it waits for the other caller by
design.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import msgspec

from deploy.local.machine.folders import Place
from deploy.local.machine.ports import free_port
from deploy.local.servers import lookup as servers
from service.identifiers import new_request_id, uuid_of
from service.server.limits import LARGEST_BODY
from tests.benchmarks.stand import LOCAL
from tests.harness import databases
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.issuer import Issuer, api_settings
from tests.harness.processes import api_process, started

# Of the median of an accepted create. A body is decoded a second time if one of its fields is wrong: 1.6 for
# the largest bodies.
ALLOWED = 2.0

_SAMPLES = 500  # of each kind
_A_KEY = "case-17"
_ACCEPTED, _ACCEPTED_LARGE = "200 accepted", "200 large, accepted"


def main() -> int:
    """Print the medians. Exit status 1 if a refusal is slower than allowed."""
    with (
        servers.postgres(Place(folder=LOCAL)) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        medians = asyncio.run(_measure(server.url, Path(folder)))
    slowest = 0.0
    for kind, median in medians.items():
        ratio = median / medians[_ACCEPTED_LARGE if "large," in kind else _ACCEPTED]
        print(f"{kind:34}{median:8.3f} ms{ratio:7.2f}")
        slowest = max(slowest, 0.0 if kind.startswith("200") else ratio)
    return 1 if slowest > ALLOWED else 0


async def _measure(server_url: str, folder: Path) -> dict[str, float]:
    issuer = Issuer(folder)
    async with databases.temporary(server_url, f"rejections_{time.time_ns()}") as url:
        settings = api_settings(url, issuer)
        nowhere = msgspec.structs.replace(settings, database_url=f"postgresql://127.0.0.1:{free_port()}/none")
        api, helpless = api_process(settings, folder), api_process(nowhere, folder, LOG_LEVEL="ERROR")
        async with (
            httpx.AsyncClient(base_url=api.base_url) as client,
            started(api),
            started(helpless, ready=False),
        ):
            await helpless.becomes_ready(status=503)
            return await _medians(client, await _calls(client, issuer, helpless.base_url))


async def _calls(client: httpx.AsyncClient, issuer: Issuer, helpless: str) -> dict[str, httpx.Request]:
    """Return every kind of call, by its status and reason. The API at *helpless* accepts none."""
    token, stranger = issuer.token(), issuer.token(FREE_CONVEYANCER)
    body = json.dumps(A_REQUEST).encode()
    signed, _, signature = token.rpartition(".")

    def create(
        content: bytes = body, token: str = token, *, server: str = "", key: str = ""
    ) -> httpx.Request:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        headers |= {"Idempotency-Key": key} if key else {}
        return client.build_request("POST", f"{server}/v1/request", content=content, headers=headers)

    def get(path: str, token: str = token) -> httpx.Request:
        return client.build_request("GET", path, headers={"Authorization": f"Bearer {token}"})

    long_addresses = {"customer_email": "a." * 120 + "@example.com", "sender_email": "x" * 254}
    deep = b'{"meta_data": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}"
    ours = (await client.send(create(key=_A_KEY))).json()["data"]["uuid"]
    return {
        _ACCEPTED: create(),
        "401 nonsense": create(token="nonsense"),
        "401 token too long": create(token="x" * 9_000),
        "401 forged signature": create(token=f"{signed}.{signature[:10]}AAAA{signature[14:]}"),
        "401 unknown API key": get("/v1/questionnaire/structure", f"cr_0123456789ab_{'x' * 43}"),
        "403 unknown conveyancer": create(token=issuer.token("stranger")),
        "404 no route": get("/nonsense"),
        "413 announced": create(b" " * (LARGEST_BODY + 1)),
        "422 empty": create(b"{}"),
        "422 addresses": create(json.dumps(A_REQUEST | long_addresses).encode()),
        "422 too deep": create(deep),
        "422 thousands of parameters": get("/v1/request?" + "&".join(f"p{n}" for n in range(8_000))),
        "422 reused key": create(b'{"notes": "",' + body[1:], key=_A_KEY),
        **{kind: create(content) for kind, content in _large_bodies()},
        "503 without Postgres": create(server=helpless),
        "404 another's": get(f"/v1/request/{ours}", stranger),
        "404 unknown": get(f"/v1/request/{uuid_of(new_request_id())}", stranger),
    }


def _large_bodies() -> Iterator[tuple[str, bytes]]:
    """Yield bodies of the largest size: what they lead to, the bytes."""
    beginning = json.dumps(A_REQUEST).removesuffix("}").encode()
    room = LARGEST_BODY - len(beginning) - 64
    lists = b"[" + b"[]," * (room // 3 - 1) + b"[]]"
    names = b",".join(b'"%05d":0' % number for number in range(room // 10))
    ignored = beginning + b',"calculation_fee_exempt_reason":' + lists
    yield _ACCEPTED_LARGE, ignored + b"}"
    yield "400 large, brackets", b"[" * LARGEST_BODY
    yield "400 large, cut off", ignored
    yield "422 large, text", beginning + b',"notes":"' + b"x" * room + b'"}'
    yield "422 large, unknown fields", beginning + b"," + names + b"}"
    yield "422 large, unknown field at its end", ignored + b',"x":1}'
    yield "422 large, meta_data", beginning + b',"meta_data":{' + names + b"}}"
    yield "422 large, lists in meta_data", beginning + b',"meta_data":{"a":' + lists + b"}}"
    yield "422 large, no object", lists


async def _medians(client: httpx.AsyncClient, calls: Mapping[str, httpx.Request]) -> dict[str, float]:
    """Return the median milliseconds of each kind."""
    taken: dict[str, list[float]] = {kind: [] for kind in calls}
    chance = random.Random(1)  # noqa: S311 - no call always follows the same one
    for _ in range(_SAMPLES):
        for kind, call in chance.sample(list(calls.items()), len(calls)):
            started_at = time.perf_counter()
            response = await client.send(call)
            taken[kind].append((time.perf_counter() - started_at) * 1000)
            if not kind.startswith(str(response.status_code)):
                raise SystemExit(f"{kind}: answered {response.status_code}")
    return {kind: statistics.median(milliseconds) for kind, milliseconds in taken.items()}


if __name__ == "__main__":
    sys.exit(main())
