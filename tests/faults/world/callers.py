"""Callers that repeat each create under its Idempotency-Key until they get an answer."""

import asyncio
import time
from itertools import count
from typing import Any
from uuid import UUID

from service.api import idempotency_key_header
from service.identifiers import parse_uuid
from tests.faults.verdict.records import Answer
from tests.faults.world.load import CUT_OFF, Caller, body_of
from worker.waiting import wait_at_most

_INTERVAL_SECONDS = 0.3
_AT_ONCE = 16  # keys in progress; at that number no new one begins
_PATIENCE_SECONDS = 20.0
_PAUSE_SECONDS = 0.2  # before the next attempt
_IMPATIENCE = 0.1  # the share of calls with a short timeout
_IMPATIENT_SECONDS = 0.02


class Callers(Caller):
    """Creates requests, each under a key, and records every answer."""

    _numbers = count(1)

    async def run(self, stop: asyncio.Event) -> None:
        """Create a few requests a second until *stop*, then wait for those in progress."""
        async with self._finishing():
            while not stop.is_set():
                if len(self._under_way) < _AT_ONCE:
                    self._start(self.create())
                await wait_at_most(_INTERVAL_SECONDS, stop)

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
        self._acknowledge(key, request_id)
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
                is_replay = idempotency_key_header.REPLAYED in response.headers
                self._record.answers.append(Answer(key, response.status_code, uuid, is_replay))
                if uuid is not None:
                    return parse_uuid(uuid)
            await asyncio.sleep(self._chance.uniform(0.0, _PAUSE_SECONDS))
        return None
