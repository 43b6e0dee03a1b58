"""A steady load: requests stored by the product's own statement, and creates over HTTP, some under a key."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import asyncpg
import httpx

from service.api import idempotency_key_header
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from tests.faults.verdict.records import Answer, Record
from tests.faults.world.mail import REFUSED_RECIPIENT
from tests.harness import stored
from tests.harness.examples import A_REQUEST
from worker.waiting import wait_at_most

_HTTP_SHARE = 0.15  # of the requests without a key; the others do not depend on the APIs
_KEYS_PER_SECOND = 3.3
_AT_ONCE = 32  # creates of one kind in progress; at that number no new one begins
_COMMIT_SECONDS = 2.0
_REFUSED_EVERY = 40
_PATIENCE_SECONDS = 20.0
_PAUSE_SECONDS = 0.2  # before the next attempt
_IMPATIENCE = 0.1  # the share of calls with a short timeout
_IMPATIENT_SECONDS = 0.02
# What a call without an answer raises. AttributeError is anyio's, when the API dies as it accepts.
_CUT_OFF = (httpx.TransportError, AttributeError)


@dataclass
class Callers:
    """Creates requests, some at the same time, and records those that are acknowledged."""

    record: Record
    pool: Pool
    apis: Sequence[httpx.AsyncClient]
    chance: random.Random
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    async def run(self, rate: float, stop: asyncio.Event) -> None:
        """Create *rate* requests a second and a few under keys until *stop*, and wait for their outcomes."""
        await asyncio.gather(
            self._repeat(self._insert, rate * (1 - _HTTP_SHARE), stop),
            self._repeat(self.post, rate * _HTTP_SHARE, stop),
            self._repeat(self.create_with_key, _KEYS_PER_SECOND, stop),
        )

    async def _repeat(self, create: Callable[[], Awaitable[Any]], rate: float, stop: asyncio.Event) -> None:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def create_one() -> None:
            async with slots:
                await create()

        async with asyncio.TaskGroup() as under_way:
            while not stop.is_set():
                if not slots.locked():
                    under_way.create_task(create_one())
                await wait_at_most(1 / rate, stop)

    async def _insert(self) -> None:
        key, body = self._next()
        request = stored.new_request(**body)
        with suppress(PostgresUnavailable, asyncpg.PostgresError):
            async with connections.acquired(self.pool, seconds=_COMMIT_SECONDS) as connection:
                await stored.insert(connection, request)
            self._acknowledge(key)

    async def post(self, api: httpx.AsyncClient | None = None) -> int | None:
        """Send a create to an API, or to any. Returns the status of the answer, if there is one."""
        key, body = self._next()
        with suppress(*_CUT_OFF):
            response = await (api or self.chance.choice(self.apis)).post("/v1/request", json=body)
            self.record.statuses[response.status_code] += 1
            if response.is_success:
                self._acknowledge(key)
            return response.status_code
        return None

    async def create_with_key(self) -> None:
        """Send one create two or three times at once and then again, each until an API answers."""
        key, body = self._next()
        sent = await asyncio.gather(*(self._send(key, body) for _ in range(self.chance.randint(2, 3))))
        if any(sent):
            self._acknowledge(key)
            await self._send(key, body)

    async def _send(self, key: str, body: dict[str, Any]) -> bool:
        """Send until an answer has a uuid, for 20 seconds; calls may be cut off or time out."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            timeout = _IMPATIENT_SECONDS if self.chance.random() < _IMPATIENCE else 5.0
            headers = {"Idempotency-Key": key}
            with suppress(*_CUT_OFF):
                response = await self.chance.choice(self.apis).post(
                    "/v1/request", json=body, headers=headers, timeout=timeout
                )
                uuid = response.json()["data"]["uuid"] if response.is_success else None
                is_replay = idempotency_key_header.REPLAYED in response.headers
                self.record.answers.append(Answer(key, response.status_code, uuid, is_replay))
                if uuid is not None:
                    return True
            await asyncio.sleep(self.chance.uniform(0.0, _PAUSE_SECONDS))
        return False

    def _next(self) -> tuple[str, dict[str, Any]]:
        """Return a new key and a body; every fortieth has a customer whom the mail server refuses."""
        number = next(self.numbers)
        key = f"case-{number}"
        prefix = REFUSED_RECIPIENT.decode() if number % _REFUSED_EVERY == 0 else ""
        return key, A_REQUEST | {"customer_email": f"{prefix}{key}@customer.example.com", "external_id": key}

    def _acknowledge(self, key: str) -> None:
        self.record.acknowledged[key] = time.monotonic()
