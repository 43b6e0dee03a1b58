"""The broker's alarm: while it lacks memory or disk, it takes nothing from those who publish."""

import asyncio

import structlog
from aio_pika.abc import AbstractChannel

from service.server.probes import NotReady

_LOOK_SECONDS = 0.1

_log = structlog.get_logger()


class Alarm:
    """Whether the broker blocks a connection: it says so once something is published (Connection.Blocked).

    The library raises nothing: it logs the broker's reason, and lets one wait until the block has ended.
    """

    def __init__(self) -> None:
        self.is_raised = False

    async def check(self) -> None:
        """Raise NotReady while the connection is blocked."""
        if self.is_raised:
            raise NotReady("RabbitMQ blocks publishers")

    async def watch(self, channel: AbstractChannel) -> None:
        """Follow what the broker says to the connection of *channel*, until cancelled."""
        connection = (await channel.get_underlay_channel()).connection
        while True:
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await connection.ready()
            except TimeoutError:
                self.is_raised = True
                _log.warning("broker_blocked")
                await connection.ready()
                self.is_raised = False
                _log.info("broker_unblocked")
            await asyncio.sleep(_LOOK_SECONDS)


async def is_blocked(channel: AbstractChannel) -> bool:
    """Whether the broker has said to the connection of *channel* that it takes nothing."""
    connection = (await channel.get_underlay_channel()).connection
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            await connection.ready()
    except TimeoutError:
        return True
    return False
