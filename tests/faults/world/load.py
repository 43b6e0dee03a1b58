"""A steady load: requests stored by the product's own statement, and some of them over HTTP."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from uuid import UUID

import httpx

from service.identifiers import parse_uuid
from service.outbox import lanes
from service.outbox.lanes import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.server.background import in_background
from tests.faults.verdict.latency import Latencies
from tests.faults.verdict.records import Record
from tests.faults.world.mail import REFUSED_RECIPIENT
from tests.harness import stored
from tests.harness.examples import A_REQUEST

# What a call without an answer raises. AttributeError is anyio's, when the API dies as it accepts.
CUT_OFF = (httpx.TransportError, AttributeError)

_AT_ONCE = 32  # requests in progress; at that number the load falls behind instead
_BEHIND_SECONDS = 1.0  # a longer delay is not caught up
_COMMIT_SECONDS = 2.0
_REFUSED_EVERY = 40
_HTTP_SHARE = 0.15  # of the requests; the others do not depend on the APIs


class Caller:
    """Creates requests, some at the same time, and records what becomes of each."""

    def __init__(
        self, record: Record, latencies: Latencies, apis: Sequence[httpx.AsyncClient], chance: random.Random
    ) -> None:
        self._record = record
        self._latencies = latencies
        self._apis = apis
        self._chance = chance
        self._under_way: set[asyncio.Task[None]] = set()

    def _start(self, creating: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(creating)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    @asynccontextmanager
    async def _finishing(self) -> AsyncIterator[None]:
        """Wait at the end for the creates in progress, and give up those that take long."""
        try:
            yield
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=10.0)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    def _acknowledge(self, key: str, request_id: UUID) -> None:
        self._record.acknowledged.add(key)
        self._latencies.committed(key, lanes.lane_of(request_id))

    def _doubt(self, key: str) -> None:
        self._record.unknown.add(key)
        self._latencies.forget(key)


class Load(Caller):
    """Stores *rate* requests a second and records the outcome of each."""

    def __init__(
        self,
        record: Record,
        latencies: Latencies,
        pool: Pool,
        apis: Sequence[httpx.AsyncClient],
        *,
        rate: float,
        chance: random.Random,
    ) -> None:
        super().__init__(record, latencies, apis, chance)
        self._pool = pool
        self._interval_seconds = 1 / rate
        self._waker = RelayWaker(pool, seconds=_COMMIT_SECONDS)

    async def run(self, stop: asyncio.Event) -> None:
        """Store requests until *stop*, then wait for those in progress."""
        due = time.monotonic()
        numbers = count(1)
        async with in_background("harness", self._waker.run), self._finishing():
            while not stop.is_set():
                if len(self._under_way) < _AT_ONCE:
                    number = next(numbers)
                    store = self._post if self._chance.random() < _HTTP_SHARE else self._insert
                    self._start(store(f"case-{number}", body_of(f"case-{number}", number)))
                due = max(due + self._interval_seconds, time.monotonic() - _BEHIND_SECONDS)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _insert(self, key: str, body: dict[str, Any]) -> None:
        try:
            async with connections.Acquired(self._pool, seconds=_COMMIT_SECONDS) as connection:
                request = stored.new_request(**body)
                await stored.insert(connection, request)
        except (PostgresUnavailable, asyncio.CancelledError):
            self._doubt(key)
        else:
            self._acknowledge(key, request.id)
            self._waker.wake()

    async def _post(self, key: str, body: dict[str, Any]) -> None:
        try:
            response = await self._chance.choice(self._apis).post("/v1/request", json=body)
        except (*CUT_OFF, asyncio.CancelledError):
            self._doubt(key)
            return
        self._record.statuses[response.status_code] += 1
        request_id = parse_uuid(response.json()["data"]["uuid"]) if response.is_success else None
        if request_id is None:
            self._doubt(key)
        else:
            self._acknowledge(key, request_id)


def body_of(key: str, number: int) -> dict[str, Any]:
    """Return the body of a create; every fortieth has a customer whom the mail server refuses."""
    prefix = REFUSED_RECIPIENT.decode() if number % _REFUSED_EVERY == 0 else ""
    return A_REQUEST | {"customer_email": f"{prefix}{key}@customer.example.com", "external_id": key}
