"""The auditor: another team, which records every event, when it came and in which order."""

import asyncio
import time
from collections.abc import Callable

import msgspec
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from service.outbox.events import CloudEvent
from tests.faults.verdict.records import Arrival
from tests.faults.world.own_queues import AUDITOR, Reader


class _Facts(msgspec.Struct, frozen=True):
    external_id: str
    sequence: int


_ACKNOWLEDGE_SECONDS = 0.05  # many at once: one by one would be slower than the events

_decoder = msgspec.json.Decoder(CloudEvent[_Facts])


class Auditor:
    """Records every event before it acknowledges it, and passes it to *watcher*."""

    def __init__(self, url: str, watcher: Callable[[Arrival], None]) -> None:
        self.arrivals: list[Arrival] = []
        self._watcher = watcher
        self._latest: AbstractIncomingMessage | None = None  # of those not acknowledged
        self._reader = Reader(url, AUDITOR, self._record, prefetch=500)

    async def run(self) -> None:
        """Consume until cancelled."""
        await self._reader.run()

    async def _record(self, _: AbstractChannel, message: AbstractIncomingMessage) -> None:
        event = _decoder.decode(message.body)
        assert event.id == message.message_id
        arrival = Arrival(
            event.id,
            event.data.external_id,
            event.type,
            event.data.sequence,
            time.monotonic(),
            redelivered=bool(message.redelivered),
        )
        self.arrivals.append(arrival)
        self._watcher(arrival)
        is_first, self._latest = self._latest is None, message
        if is_first:
            try:
                await asyncio.sleep(_ACKNOWLEDGE_SECONDS)
            finally:  # also when a closed channel cancels this
                latest, self._latest = self._latest, None
            await latest.ack(multiple=True)
