"""The messages in hand on one channel, and their acknowledgements: many with one frame where that can be."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import takewhile

import structlog
from aio_pika.abc import AbstractIncomingMessage

from service.telemetry import logs

_log = structlog.get_logger()


class InHand:
    """The messages of one channel that are not settled yet, in the order of their delivery.

    Handled messages are acknowledged together, with one frame for those before which none is open. The others
    are acknowledged one by one, so that none waits for another that is still handled or dead-lettered.
    """

    def __init__(
        self, deliver: "Callable[[InHand, AbstractIncomingMessage], Coroutine[None, None, None]]"
    ) -> None:
        self._deliver = deliver
        self.leaving = asyncio.Event()  # Closing the channel returns what is in hand to the queue.
        self._deliveries: set[asyncio.Task[None]] = set()
        self._open: dict[int, AbstractIncomingMessage] = {}  # by delivery tag; the prefetch bounds it
        self._done: set[int] = set()
        self._acknowledging: asyncio.Task[None] | None = None

    async def receive(self, message: AbstractIncomingMessage) -> None:
        """Start a delivery, in a task that outlives the channel: aio-pika cancels its own when one closes."""
        self._open[message.delivery_tag or 0] = message
        task = asyncio.create_task(self._deliver(self, message))
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)

    def acknowledge(self, message: AbstractIncomingMessage) -> None:
        """Acknowledge a message soon. Returns at once."""
        self._done.add(message.delivery_tag or 0)
        if self._acknowledging is None:
            self._acknowledging = asyncio.create_task(self._acknowledge())

    async def requeue(self, message: AbstractIncomingMessage) -> None:
        """Return a message to its queue. It counts as a delivery, which a nack does not everywhere."""
        try:
            await message.reject(requeue=True)
        except Exception as error:  # noqa: BLE001 - see _give_up
            self._give_up(error)
        self._open.pop(message.delivery_tag or 0)

    async def finish(self, *, seconds: float) -> None:
        """Wait for the deliveries, with a bound. Those not settled by then return to the queue."""
        if self._deliveries:
            await asyncio.wait(self._deliveries, timeout=seconds)
        for delivery in self._deliveries:
            delivery.cancel()
        await asyncio.gather(*self._deliveries, return_exceptions=True)
        if self._acknowledging is not None:
            await self._acknowledging

    async def _acknowledge(self) -> None:
        try:
            while self._done:
                done, self._done = self._done, set()
                together = len(list(takewhile(done.__contains__, self._open)))
                messages = [self._open.pop(tag) for tag in list(self._open) if tag in done]
                for number, message in enumerate(messages, 1):
                    if number >= together:
                        await message.ack(multiple=number == together)
        except Exception as error:  # noqa: BLE001 - see _give_up
            self._give_up(error)
        finally:
            self._acknowledging = None

    def _give_up(self, error: Exception) -> None:
        """Leave the channel, because a message was not settled: it would use up the prefetch for good."""
        self.leaving.set()
        _log.error("message_not_settled", **logs.describe(error))
