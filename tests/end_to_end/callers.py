"""Callers of the API."""

import itertools
from functools import partial
from typing import Any

import httpx

from tests.harness.examples import A_REQUEST
from tests.harness.http import NO_TLS, bearer
from tests.harness.processes import Process
from tests.harness.waiting import eventually

_numbers = itertools.count(1)


def another_request() -> dict[str, Any]:
    """Return a body with a unique customer's address and external_id."""
    number = next(_numbers)
    return A_REQUEST | {
        "customer_email": f"customer-{number}@customer.example.com",
        "external_id": f"case-{number}",
    }


def client_of(api: Process, token: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=api.base_url, headers=bearer(token), timeout=20.0, verify=NO_TLS)


async def answers(client: httpx.AsyncClient, path: str, expected: int) -> bool:
    return (await client.get(path)).status_code == expected


async def become_alive_but_not_ready(*probes: httpx.AsyncClient) -> None:
    """Wait until processes live and lack something that they need."""
    for each in probes:
        assert await answers(each, "/livez", 200)
        await eventually(partial(answers, each, "/readyz", 503))


async def create(
    client: httpx.AsyncClient, body: dict[str, Any] | None = None, **headers: str
) -> dict[str, Any]:
    """Create a request, by default another one, and return its record."""
    response = await client.post("/v1/request", json=body or another_request(), headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["data"]


async def create_if_possible(client: httpx.AsyncClient) -> dict[str, Any] | None:
    """Create another request, and return its record; None while the API refuses for lack of Postgres."""
    response = await client.post("/v1/request", json=another_request())
    assert response.status_code in {200, 503}, response.text
    return response.json()["data"] if response.is_success else None
