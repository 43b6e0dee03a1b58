"""The auditor: another team that hears every event and writes down when, and in which order."""

import asyncio
import time
from collections.abc import Callable

import msgspec
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from service.outbox.events import CloudEvent
from tests.faults.own_queues import AUDITOR, Reader
from tests.faults.records import Arrival


class _Facts(msgspec.Struct, frozen=True):
    external_id: str
    sequence: int


_ACKNOWLEDGE_SECONDS = 0.05  # all of it together: one by one takes longer than events come

_decoder = msgspec.json.Decoder(CloudEvent[_Facts])


class Auditor:
    """Writes down every event before it acknowledges it; tells *watcher* too."""

    def __init__(self, url: str, watcher: Callable[[Arrival], None]) -> None:
        self.arrivals: list[Arrival] = []
        self._watcher = watcher
        self._latest: AbstractIncomingMessage | None = None  # of those not acknowledged
        self._reader = Reader(url, AUDITOR, self._hear, prefetch=500)

    async def run(self) -> None:
        """Listen until cancelled."""
        await self._reader.run()

    async def _hear(self, _: AbstractChannel, message: AbstractIncomingMessage) -> None:
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
            finally:  # also when the channel was closed, and with it this
                latest, self._latest = self._latest, None
            await latest.ack(multiple=True)
