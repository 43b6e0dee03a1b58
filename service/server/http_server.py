"""Serves an ASGI application on a socket until asked to stop: the API, and the worker's probes."""

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import uvicorn

from service.server import limits
from service.server.asgi import ASGIApp
from service.server.http_protocol import HttpProtocol
from service.settings import InvalidSetting

_SWEEP_SECONDS = 1.0  # between two checks for overdue callers
# The garbage collector may run rarely, because nearly everything is freed without it.
_OBJECTS_PER_COLLECTION = 10_000


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises InvalidSetting when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # Name resolution errors have negative numbers, which strerror does not know.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else "no such host"
        raise InvalidSetting(f"cannot listen on {host}:{port} ({reason})") from None


def spare_loaded_objects() -> None:
    """Exempt loaded modules from garbage collection, which would scan 70,000 objects, for 50 ms each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)


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
    shutdown_seconds: float,
    keep_alive_seconds: int = 5,
) -> None:
    """Serve until *stop*, then finish the requests in flight, in at most *shutdown_seconds*.

    If the application fails to start, the process ends. The log says why.
    """
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=HttpProtocol,
        ws="none",
        proxy_headers=False,  # The client's address is not used.
        access_log=False,
        log_config=None,
        server_header=False,
        reset_contextvars=True,  # Otherwise a pipelined request would continue the previous trace.
        timeout_keep_alive=keep_alive_seconds,
        timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
    )
    await _Server(config, stop).serve(sockets=[listening])


class _Server(uvicorn.Server):
    """A server that handles no signals and stops on an event, because it is only part of a process."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not self._stop.is_set():
            await self.on_tick(0)  # updates the Date header
            now = asyncio.get_running_loop().time()
            # One pass over all connections costs less than a timer for each request.
            end_overdue(self.server_state.connections, now)
            with suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_SECONDS):
                    await self._stop.wait()


def end_overdue(connections: Iterable[object], now: float) -> None:
    """Cut off overdue callers, then the slowest readers until the total of unread bytes is in bounds."""
    ours = [each for each in connections if isinstance(each, HttpProtocol)]
    for connection in ours:
        connection.end_if_overdue(now)
    unread = sum(each.unread for each in ours)
    for reader in sorted((each for each in ours if each.unread), key=HttpProtocol.expendability):
        if unread <= limits.MOST_UNREAD:
            return
        unread -= reader.unread
        reader.cut_off()
