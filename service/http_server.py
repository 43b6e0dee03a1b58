"""Serves an ASGI application on a socket until told to stop: for the API and for the worker's probes."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from litestar.types import ASGIApp

from service.settings import InvalidSetting


class ApplicationNotStarted(Exception):
    """The application failed before it could serve; its log says why."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises InvalidSetting when the port is not to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # The numbers of name resolution are negative, and none of the system's.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else "no such host"
        raise InvalidSetting(f"cannot listen on {host}:{port} ({reason})") from None


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set. Both processes then finish what they have in hand."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def serve(
    app: ASGIApp, listening: socket.socket, stop: asyncio.Event, *, shutdown_seconds: float
) -> None:
    """Serve until *stop*, then finish the requests under way, in *shutdown_seconds* at most."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
    )
    server = _Server(config, stop)
    await server.serve(sockets=[listening])
    if not server.started:
        raise ApplicationNotStarted


class _Server(uvicorn.Server):
    """A server that is part of a process: it leaves the signals alone, and stops by an event."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not self._stop.is_set():
            await self.on_tick(0)  # Brings the date of the responses up to date.
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stop.wait()
