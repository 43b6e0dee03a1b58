"""A window of events being published on a channel, and their confirms."""

import asyncio
import struct
from collections.abc import Collection, Sequence
from typing import Any

import aiormq
from aiormq.abc import ChannelFrame

from worker.rabbitmq.connection import BrokerUnavailable
from worker.relay import frames
from worker.relay.outbox import OutboxRow

_CLOSING_SECONDS = 0.1  # for confirms that arrived just before the channel closed

# What is raised for an event that AMQP cannot carry.
UNENCODABLE = (ValueError, TypeError, struct.error)


class ConfirmWindow:
    """Events being published, and for each a future: its confirm, or the exception for its nack or return.

    `write` does for a whole window what aiormq's basic_publish does for one message. basic_publish takes a
    task, a lock and a timeout for each message, which halved the rate of the relay. `write` uses undocumented
    attributes of aiormq's channel: hence the bound on its version in pyproject.toml.

    The invariant is that of basic_publish. The broker numbers the messages of a channel 1, 2, 3, … as they
    arrive, and confirms them by number; aiormq looks up a number's future in `confirmations`. So each message
    takes the next `delivery_tag` and registers its future under it, and an event that cannot be encoded takes
    none. The channel's lock is held until all messages are in the write queue, in the order of their numbers.
    If `write` fails, numbers were taken for messages that may never be sent: the channel must be closed.
    """

    def __init__(self, channel: aiormq.Channel) -> None:
        self._channel = channel
        self.confirms: dict[int, asyncio.Future[Any]] = {}  # by the id of the row

    async def write(self, rows: Sequence[OutboxRow]) -> None:
        """Encode all rows and write them at once."""
        channel, loop = self._channel, asyncio.get_running_loop()
        payload = []
        async with channel.lock:
            for row in rows:
                self.confirms[row.id] = confirm = loop.create_future()
                event_id = row.event_id
                try:
                    written = frames.encode_event(
                        row,
                        event_id,
                        channel=channel.number,
                        longest_body=channel.max_content_size,
                    )
                except UNENCODABLE as error:
                    confirm.set_exception(error)
                    continue
                payload.append(written)
                channel.delivery_tag += 1
                channel.confirmations[channel.delivery_tag] = confirm
                channel.message_id_delivery_tag[event_id] = channel.delivery_tag  # A return has only the id.
            await channel.write_queue.put(ChannelFrame(payload=b"".join(payload), should_close=False))

    async def wait(self, *, seconds: float, abandoned: asyncio.Event) -> Exception | None:
        """Wait for all confirms, at most *seconds*, until *abandoned* is set, or until the channel closes.

        Confirms still missing then are cancelled, and the channel must not be used again. Returns the reason
        if the channel closed: that alone does not end a future.
        """
        closing = self._channel.closing
        confirms = self.confirms.values()
        waits: list[asyncio.Future[Any]] = [
            asyncio.create_task(_until_done(confirms)),
            asyncio.create_task(abandoned.wait()),
            closing,
        ]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await asyncio.wait(confirms, timeout=_CLOSING_SECONDS)
        finally:
            unfinished = [each for each in (*confirms, *waits) if not each.done()]
            for each in unfinished:
                each.cancel()
            self._channel.message_id_delivery_tag.clear()  # A late return belongs to no window.
        await asyncio.gather(*unfinished, closing, return_exceptions=True)
        if closing.cancelled():
            return None
        reason = closing.exception()  # CancelledError if aiormq has given up its reader
        return reason if isinstance(reason, Exception) else BrokerUnavailable("the connection is closed")


async def _until_done(confirms: Collection[asyncio.Future[Any]]) -> None:
    """Wait for each in turn: most are done when their turn comes, and cost nothing."""
    for confirm in confirms:
        if not confirm.done():
            await asyncio.wait([confirm])
