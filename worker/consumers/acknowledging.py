"""Acknowledges handled messages, many with one frame where it can."""

import asyncio
from collections.abc import Callable

from aio_pika.abc import AbstractIncomingMessage


class Acknowledgements:
    """The messages of one channel that are not settled yet, in the order of their delivery.

    Handled messages are acknowledged together, with one frame for those before which none is open. The others
    are acknowledged one by one, so that none waits for another that is still handled or dead-lettered.

    *give_up* is called with the error if acknowledging fails. It must leave the channel: closing it returns
    the messages to the queue.
    """

    def __init__(self, give_up: Callable[[Exception], None]) -> None:
        self._give_up = give_up
        self._open: dict[int, AbstractIncomingMessage] = {}  # by delivery tag; the prefetch bounds it
        self._handled: list[int] = []
        self._acknowledging: asyncio.Task[None] | None = None

    def add(self, message: AbstractIncomingMessage) -> None:
        """Note a message that was received."""
        self._open[_tag(message)] = message

    def forget(self, message: AbstractIncomingMessage) -> None:
        """Note a message that is settled in another way."""
        self._open.pop(_tag(message), None)

    def acknowledge(self, message: AbstractIncomingMessage) -> None:
        """Acknowledge a message soon. Returns at once."""
        self._handled.append(_tag(message))
        if self._acknowledging is None:
            self._acknowledging = asyncio.create_task(self._acknowledge())

    async def finish(self) -> None:
        """Wait until the acknowledgements are written."""
        if self._acknowledging is not None:
            await self._acknowledging

    async def _acknowledge(self) -> None:
        try:
            while self._handled:
                await self._acknowledge_handled()
        except Exception as error:  # noqa: BLE001 - left unsettled, they would use up prefetch for good
            self._give_up(error)
        finally:
            self._acknowledging = None

    async def _acknowledge_handled(self) -> None:
        handled, self._handled = set(self._handled), []
        last = None
        for tag in list(self._open):
            if tag not in handled:
                break
            last = self._open.pop(tag)
        others = [self._open.pop(tag) for tag in handled if tag in self._open]
        if last is not None:
            await last.ack(multiple=True)
        for message in others:
            await message.ack()


def _tag(message: AbstractIncomingMessage) -> int:
    return message.delivery_tag or 0
