"""Refused secrets: whether the time shows that a request exists. Nothing is required of the figures."""

import statistics
import time
from collections.abc import Mapping

import httpx

from service.identifiers import new_request_id, uuid_of
from tests.benchmarks import subjects
from tests.benchmarks.comparison import Comparison
from tests.benchmarks.http_load import P50, P99
from tests.benchmarks.stand import Stand
from tests.harness.http import NO_TLS

WRONG, UNKNOWN = "wrong secret", "unknown uuid"

_CALLS = 2_000  # of each kind, in each round
_HEADERS = {"Authorization": f"Bearer {'A' * 43}"}


async def measure(stand: Stand) -> list[Comparison]:
    """Send secrets over one connection, in turn for an ordinary request and for one that does not exist."""
    comparison = Comparison(name="refused secrets", rounds={WRONG: [], UNKNOWN: []})
    async with (
        stand.api(await stand.database("ours")) as api,
        httpx.AsyncClient(base_url=api.base_url, headers=_HEADERS, verify=NO_TLS) as client,
    ):
        (stored,) = await subjects.create_over_http(stand, api.base_url, 1)
        paths = {WRONG: stored, UNKNOWN: f"/v1/request/{uuid_of(new_request_id())}"}
        for _ in range(stand.sizes.rounds):
            await stand.settle()
            for side, milliseconds in (await _milliseconds(client, paths)).items():
                quantiles = statistics.quantiles(milliseconds, n=100)
                comparison.rounds[side].append({P50: quantiles[49], P99: quantiles[98]})
    return [comparison]


async def _milliseconds(client: httpx.AsyncClient, paths: Mapping[str, str]) -> dict[str, list[float]]:
    """Return how long each call took, by side."""
    taken: dict[str, list[float]] = {side: [] for side in paths}
    for _ in range(_CALLS):
        for side, path in paths.items():
            started_at = time.perf_counter()
            response = await client.get(path)
            taken[side].append((time.perf_counter() - started_at) * 1000)
            assert response.status_code == httpx.codes.UNAUTHORIZED
    return taken
