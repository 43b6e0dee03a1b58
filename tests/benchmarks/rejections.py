"""How long a refusal takes, compared with an acceptance: `python -m tests.benchmarks.rejections`.

One caller sends every kind of call, in random order, to an API and to one without Postgres.
The table has medians in milliseconds, and their ratio to the median of an accepted create: of an ordinary
one, or, for bodies of the largest size, of the slowest accepted one of that size. The last two lines must not
differ: another conveyancer's request, and one that does not exist. 409 is missing: it waits for the other
caller by design.
"""

import argparse
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

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from deploy.local.servers import lookup as servers
from service.identifiers import new_request_id, uuid_of
from service.server.limits import LARGEST_BODY
from tests.harness import databases
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.issuer import Issuer, api_settings
from tests.harness.processes import api_process, started

ALLOWED = 1.2  # of the median of an accepted create

_A_KEY = "case-17"
_UNKNOWN_API_KEY = "cr_0123456789ab_" + "x" * 43
_ACCEPTED, _ACCEPTED_LARGE = "200 accepted", "200 accepted, large"


def main() -> int:
    """Print the table. Exit status 1 if a refusal is slower than allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=500, help="of each kind (default: 500)")
    samples = parser.parse_args().samples
    with servers.postgres(CHECKOUT / ".local" / "benchmarks", keep=False, report=print) as server:
        return asyncio.run(_run(server.url, samples))


async def _run(server_url: str, samples: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        async with databases.temporary(server_url, f"rejections_{time.time_ns()}") as url:
            return await _measure_api(url, Path(folder), samples)


async def _measure_api(url: str, folder: Path, samples: int) -> int:
    issuer = Issuer(folder)
    settings = api_settings(url, issuer)
    nowhere = f"postgresql://127.0.0.1:{free_port()}/none"
    api = api_process(settings, folder)
    helpless = api_process(msgspec.structs.replace(settings, database_url=nowhere), folder, LOG_LEVEL="ERROR")
    async with (
        httpx.AsyncClient(base_url=api.base_url) as client,
        started(api),
        started(helpless, ready=False),
    ):
        await helpless.becomes_alive_but_not_ready()
        calls = await _calls(client, issuer, helpless.base_url)
        medians = await _medians(client, calls, samples)
    return _print_table(calls, medians)


class Call(msgspec.Struct, frozen=True):
    """A call, the status that it must be answered with, and the accepted call to compare it with."""

    status: int
    request: httpx.Request
    beside: str = _ACCEPTED


async def _calls(client: httpx.AsyncClient, issuer: Issuer, helpless: str) -> dict[str, Call]:
    """Return every kind of call; the first is accepted. The API at *helpless* accepts none."""
    token, stranger = issuer.token(), issuer.token(FREE_CONVEYANCER)
    body = json.dumps(A_REQUEST).encode()
    signed, _, signature = token.rpartition(".")
    forged = f"{signed}.{signature[:10]}{'AAAA'}{signature[14:]}"

    def create(
        content: bytes = body,
        token: str = token,
        media_type: str = "application/json",
        *,
        server: str = "",
        key: str | None = None,
    ) -> httpx.Request:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": media_type}
        if key is not None:
            headers["Idempotency-Key"] = key
        return client.build_request("POST", f"{server}/v1/request", content=content, headers=headers)

    def get(path: str, token: str = token) -> httpx.Request:
        return client.build_request("GET", path, headers={"Authorization": f"Bearer {token}"})

    ours = (await client.send(create(key=_A_KEY))).json()["data"]["uuid"]
    parameters = "&".join(f"p{number}" for number in range(8_000))
    many_wrong = {f"wrong-{number}": 1 for number in range(3_000)}
    long_local_part = {"customer_email": "a." * 120 + "@example.com", "sender_email": "x" * 254}
    deep = b'{"meta_data": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}"
    large = {"meta_data": {str(number): "\u20ac" * 10 for number in range(800)}}
    return {
        _ACCEPTED: Call(200, create()),
        "400 malformed": Call(400, create(b"[" * 60_000)),
        "401 no token": Call(401, client.build_request("POST", "/v1/request", content=body)),
        "401 nonsense": Call(401, create(token="nonsense")),
        "401 too large": Call(401, create(token="x" * 9_000)),
        "401 forged signature": Call(401, create(token=forged)),
        "401 expired": Call(401, create(token=issuer.token(exp=1))),
        "401 unknown API key": Call(401, get("/v1/questionnaire/structure", _UNKNOWN_API_KEY)),
        "403 scope": Call(403, create(token=issuer.token(scope="request:read"))),
        "403 unknown conveyancer": Call(403, create(token=issuer.token("stranger"))),
        "404 no route": Call(404, client.build_request("GET", "/nonsense")),
        "405": Call(405, client.build_request("DELETE", "/v1/request")),
        "413 announced": Call(413, create(b" " * (LARGEST_BODY + 1))),
        "415": Call(415, create(media_type="text/plain")),
        "422 empty": Call(422, create(b"{}")),
        "422 addresses": Call(422, create(json.dumps(A_REQUEST | long_local_part).encode())),
        "422 too deep": Call(422, create(deep)),
        "422 thousands of fields": Call(422, create(json.dumps(A_REQUEST | many_wrong).encode())),
        "422 thousands of parameters": Call(422, get(f"/v1/request?{parameters}")),
        "422 large meta_data": Call(422, create(json.dumps(A_REQUEST | large).encode())),
        **{
            f"{status} {kind}": Call(status, create(content), _ACCEPTED_LARGE)
            for status, kind, content in _large_bodies()
        },
        "422 reused key": Call(422, create(b'{"notes": "",' + body[1:], key=_A_KEY)),
        "422 list": Call(422, get("/v1/request?limit=0&cursor=next&sort=name")),
        "503 without Postgres": Call(503, create(server=helpless)),
        "404 another's": Call(404, get(f"/v1/request/{ours}", stranger)),
        "404 unknown": Call(404, get(f"/v1/request/{uuid_of(new_request_id())}", stranger)),
    }


def _large_bodies() -> Iterator[tuple[int, str, bytes]]:
    """Yield bodies of the largest size: the status, what fills them, the bytes."""
    beginning = json.dumps(A_REQUEST).removesuffix("}").encode()
    room = LARGEST_BODY - len(beginning) - 64
    lists = b"[" + b"[]," * (room // 3 - 1) + b"[]]"
    names = b",".join(b'"%05d":0' % number for number in range(room // 10))
    ignored = beginning + b',"calculation_fee_exempt_reason":' + lists
    yield 200, _ACCEPTED_LARGE.removeprefix("200 "), ignored + b"}"
    yield 200, "accepted, large text", (json.dumps(A_REQUEST | {"notes": "\U0001f3e0" * 10_000})).encode()
    yield 400, "large, brackets", b"[" * LARGEST_BODY
    yield 400, "large, cut off", ignored
    yield 422, "large, text", beginning + b',"notes":"' + b"x" * room + b'"}'
    yield 422, "large, unknown fields", beginning + b"," + names + b"}"
    yield 422, "large, unknown field", beginning + b',"x":' + lists + b"}"
    yield 422, "large, unknown field at its end", ignored + b',"x":1}'
    yield 422, "large, meta_data", beginning + b',"meta_data":{' + names + b"}}"
    yield 422, "large, lists in meta_data", beginning + b',"meta_data":{"a":' + lists + b"}}"
    yield 422, "large, no object", lists


async def _medians(client: httpx.AsyncClient, calls: Mapping[str, Call], samples: int) -> dict[str, float]:
    """Return the median milliseconds of each kind."""
    taken: dict[str, list[float]] = {kind: [] for kind in calls}
    chance = random.Random(1)  # noqa: S311 - no call always follows the same one
    for _ in range(samples):
        for kind, call in chance.sample(list(calls.items()), len(calls)):
            started_at = time.perf_counter()
            response = await client.send(call.request)
            taken[kind].append((time.perf_counter() - started_at) * 1000)
            if response.status_code != call.status:
                raise SystemExit(f"{kind}: answered {response.status_code}")
    return {kind: statistics.median(milliseconds) for kind, milliseconds in taken.items()}


def _print_table(calls: Mapping[str, Call], medians: Mapping[str, float]) -> int:
    ratios = {kind: median / medians[calls[kind].beside] for kind, median in medians.items()}
    for kind, median in medians.items():
        print(f"{kind:32}{median:8.3f} ms{ratios[kind]:7.2f}")
    return 1 if max(ratio for kind, ratio in ratios.items() if calls[kind].status != 200) > ALLOWED else 0


if __name__ == "__main__":
    sys.exit(main())
