"""Serves the journey on the loopback interface until SIGTERM: `python -m deploy.local.journey`."""

import asyncio
import os
import signal

import msgspec
from granian.constants import Interfaces
from granian.server.embed import Server

from deploy.local.journey.app import create_app
from deploy.local.journey.resources import Settings


async def _serve(settings: Settings) -> None:
    # There is no access log, because it would have the queries, and so the secrets.
    server = Server(
        create_app(settings),
        port=settings.port,
        interface=Interfaces.ASGI,
        websockets=False,
        log_enabled=False,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    await server.serve()


if __name__ == "__main__":
    asyncio.run(_serve(msgspec.convert(dict(os.environ), Settings, strict=False)))
