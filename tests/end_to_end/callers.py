"""Callers of the API, and load."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from tests.harness.examples import A_REQUEST
from tests.harness.http import NO_TLS
from tests.harness.processes import Process
from tests.harness.waiting import eventually
from worker.waiting import wait_at_most

_PAUSE_SECONDS = 0.05  # after a call without an answer
_numbers = itertools.count(1)


def another_request() -> dict[str, Any]:
    """Return a body with a unique customer's address and external_id."""
    number = next(_numbers)
    return A_REQUEST | {
        "customer_email": f"customer-{number}@customer.example.com",
        "external_id": f"case-{number}",
    }


def client_of(api: Process, token: str) -> httpx.AsyncClient:
    """Return a client of the API that sends *token*."""
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=api.base_url, headers=headers, timeout=20.0, verify=NO_TLS)


async def answers(client: httpx.AsyncClient, path: str, expected: int) -> bool:
    """Whether a GET is answered with this status."""
    return (await client.get(path)).status_code == expected


async def become_alive_but_not_ready(*probes: httpx.AsyncClient) -> None:
    """Wait until processes live and lack something that they need."""
    for each in probes:
        assert await answers(each, "/livez", 200)
        await eventually(partial(answers, each, "/readyz", 503))


async def create(client: httpx.AsyncClient) -> dict[str, Any]:
    """Create another request, and return its record."""
    response = await client.post("/v1/request", json=another_request())
    assert response.status_code == 200, response.text
    record: dict[str, Any] = response.json()["data"]
    return record


async def create_many(client: httpx.AsyncClient, count: int, *, at_once: int = 4) -> list[dict[str, Any]]:
    """Create *count* requests, *at_once* at a time, and return their records."""
    places = asyncio.Semaphore(at_once)

    async def create_in_turn() -> dict[str, Any]:
        async with places:
            return await create(client)

    return await asyncio.gather(*(create_in_turn() for _ in range(count)))


@dataclass
class Load:
    """What callers have sent so far, by external_id, and the answers."""

    sent: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)  # These were answered with 200.
    refused: list[int] = field(default_factory=list)  # the status of any other answer

    async def call(self, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        """Post one request after another until *stop*, even while the API is down."""
        while not stop.is_set():
            body = another_request()
            self.sent.add(body["external_id"])
            try:
                response = await client.post("/v1/request", json=body)
            except httpx.TransportError:
                await wait_at_most(_PAUSE_SECONDS, stop)
                continue
            if response.status_code == 200:
                self.stored.add(body["external_id"])
            else:
                self.refused.append(response.status_code)


@asynccontextmanager
async def under_load(api: Process, token: str, *, callers: int = 4) -> AsyncIterator[Load]:
    """Let *callers* post requests until the block is left."""
    load = Load()
    stop = asyncio.Event()
    async with client_of(api, token) as client, asyncio.TaskGroup() as calls:
        for _ in range(callers):
            calls.create_task(load.call(client, stop))
        try:
            yield load
        finally:
            stop.set()
