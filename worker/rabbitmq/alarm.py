"""RabbitMQ's alarm. While RabbitMQ is short of memory or disk, it reads nothing from publishing connections.

The relay treats an alarm as an outage. Until the alarm ends, /readyz reports it and no event is published.
"""

import asyncio

import structlog
from aio_pika.abc import AbstractChannel

_LOOK_SECONDS = 0.1  # the longest wait for a connection to be ready, and the pause between checks

_log = structlog.get_logger()


class Alarm:
    """Whether RabbitMQ blocks a connection. RabbitMQ reports this only after a publish (Connection.Blocked).

    aiormq raises no error then. It logs the broker's reason, and its `ready` waits until the block has ended.
    """

    def __init__(self) -> None:
        self.is_raised = False

    async def watch(self, channel: AbstractChannel) -> None:
        """Follow the alarm on the connection of *channel* until cancelled."""
        connection = (await channel.get_underlay_channel()).connection
        while True:
            if await is_blocked(channel):
                self.is_raised = True
                _log.warning("broker_blocked")
                await connection.ready()
                self.is_raised = False
                _log.info("broker_unblocked")
            await asyncio.sleep(_LOOK_SECONDS)


async def is_blocked(channel: AbstractChannel) -> bool:
    """Whether the broker blocks the connection of *channel*."""
    connection = (await channel.get_underlay_channel()).connection
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            await connection.ready()
    except TimeoutError:
        return True
    return False
