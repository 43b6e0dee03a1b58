"""Callers that repeat each create under its Idempotency-Key until they get an answer."""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import count
from typing import Any
from uuid import UUID

import httpx

from service.api import idempotency_key
from service.identifiers import parse_uuid
from service.outbox import lanes
from tests.faults.verdict.latency import Latencies
from tests.faults.verdict.records import Answer, Record
from tests.faults.world.load import CUT_OFF, body_of
from worker.waiting import wait_at_most

_INTERVAL_SECONDS = 0.3
_AT_ONCE = 16  # keys in progress; at that number no new one begins
_PATIENCE_SECONDS = 20.0
_PAUSE_SECONDS = 0.2  # before the next attempt
_IMPATIENCE = 0.1  # the share of calls with a short timeout
_IMPATIENT_SECONDS = 0.02


class Callers:
    """Creates requests, each under a key, and records every answer."""

    def __init__(
        self, record: Record, latencies: Latencies, apis: Sequence[httpx.AsyncClient], chance: random.Random
    ) -> None:
        self._record = record
        self._latencies = latencies
        self._apis = apis
        self._chance = chance
        self._numbers = count(1)
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Create a few requests a second until *stop*, then wait for those in progress."""
        try:
            while not stop.is_set():
                if len(self._under_way) < _AT_ONCE:
                    self._start()
                await wait_at_most(_INTERVAL_SECONDS, stop)
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=10.0)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    def _start(self) -> None:
        task = asyncio.create_task(self.create())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def create(self) -> None:
        """Send one create two or three times at once and then again, each until an API answers."""
        number = next(self._numbers)
        key = f"keyed-{number}"
        body = body_of(key, number)
        try:
            stored = await asyncio.gather(*(self._send(key, body) for _ in range(self._chance.randint(2, 3))))
        except asyncio.CancelledError:
            self._doubt(key)
            raise
        request_id = next(filter(None, stored), None)
        if request_id is None:
            self._doubt(key)
            return
        self._record.acknowledged.add(key)
        self._latencies.committed(key, lanes.lane_of(request_id))
        await self._send(key, body)

    async def _send(self, key: str, body: dict[str, Any]) -> UUID | None:
        """Send until an answer has a uuid, for 20 seconds; calls may be cut off or time out."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            impatient = self._chance.random() < _IMPATIENCE
            try:
                response = await self._chance.choice(self._apis).post(
                    "/v1/request",
                    json=body,
                    headers={"Idempotency-Key": key},
                    timeout=_IMPATIENT_SECONDS if impatient else 5.0,
                )
            except CUT_OFF:
                pass
            else:
                uuid = response.json()["data"]["uuid"] if response.is_success else None
                is_replay = idempotency_key.REPLAYED in response.headers
                self._record.answers.append(Answer(key, response.status_code, uuid, is_replay))
                if uuid is not None:
                    return parse_uuid(uuid)
            await asyncio.sleep(self._chance.uniform(0.0, _PAUSE_SECONDS))
        return None

    def _doubt(self, key: str) -> None:
        self._record.unknown.add(key)
        self._latencies.forget(key)
