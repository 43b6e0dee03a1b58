"""Serves an ASGI application on a socket until asked to stop: the API, and the worker's probes.

One process, one event loop: running more of them is left to Kubernetes.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from service.server.asgi import ASGIApp
from service.server.http_protocol import HttpConfig, HttpProtocol, failing_on_body_errors
from service.server.refusals import Refuse
from service.settings import InvalidSetting

_SHUTDOWN_POLL_SECONDS = 0.005


class ApplicationNotStarted(Exception):
    """The application failed during startup; its log says why."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises InvalidSetting when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # Errors of name resolution have negative numbers, which strerror does not know.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else "no such host"
        raise InvalidSetting(f"cannot listen on {host}:{port} ({reason})") from None


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, so that the process finishes its work before it exits."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def serve(
    app: ASGIApp,
    listening: socket.socket,
    stop: asyncio.Event,
    *,
    refuse: Refuse,
    shutdown_seconds: float,
    head_seconds: float = 10.0,
    body_seconds: float = 30.0,
) -> None:
    """Serve until *stop*, then finish the current requests, in at most *shutdown_seconds*.

    For the other arguments see HttpConfig.
    """
    config = HttpConfig(
        failing_on_body_errors(app),
        interface="asgi3",
        http=HttpProtocol,
        ws="none",
        proxy_headers=False,  # The client's address is not used.
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
    )
    config.refuse, config.head_seconds, config.body_seconds = refuse, head_seconds, body_seconds
    server = _Server(config, stop)
    await server.serve(sockets=[listening])
    if not server.started:
        raise ApplicationNotStarted


class _Server(uvicorn.Server):
    """A server that is one part of a process: it handles no signals, and stops on an event."""

    config: HttpConfig

    def __init__(self, config: HttpConfig, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        seconds = min(1.0, self.config.head_seconds, self.config.body_seconds)
        while not self._stop.is_set():
            await self.on_tick(0)  # updates the Date header
            self._end_overdue()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the current requests in time, cancel the others, and shut the application down.

        uvicorn's own takes 0.1 s even when nothing is connected.
        """
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - plain sets
                    await asyncio.sleep(_SHUTDOWN_POLL_SECONDS)
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()

    def _end_overdue(self) -> None:
        """Check all connections at once: a timer for each request would cost every request."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpProtocol):
                connection.end_if_overdue(now)
