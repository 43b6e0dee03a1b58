"""Serves an ASGI application until asked to stop: the API, and the worker's probes.

The server is the embedded one of Granian, which Granian calls experimental: a known risk. `granian.Granian`
was tried: it runs the application in a child process, which takes 16 MB more and cannot drain connections.
uvicorn 0.54 loses a body that is offered with h2c, and never closes a connection that is silent in the head.
"""

import asyncio
import gc
import signal
import socket
from collections.abc import Callable
from typing import TypeAlias, cast

import structlog
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from service.server.asgi import ASGIApp, Message, Receive, Scope, Send
from service.server.limits import LARGEST_HEAD, MOST_CONNECTIONS
from service.settings import InvalidSetting
from service.telemetry import logs

Address: TypeAlias = tuple[str, int]  # the host as a number, and the port

_log = structlog.get_logger()


class ServerFailed(Exception):
    """The HTTP server failed: the log says why."""


def find_address(host: str, port: int) -> Address:
    """Return the address to listen on. Raises InvalidSetting when it cannot be used.

    Granian resolves no names. It would also share a port with another process that listens on it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as listening:
            found: str = listening.getsockname()[0]
    except OSError as error:
        raise InvalidSetting(f"cannot listen on {host}:{port} ({error.strerror})") from None
    return found, port


def spare_loaded_objects() -> None:
    """Exempt loaded modules from garbage collection, which would scan 70,000 objects, for 50 ms each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # It may run rarely, because nearly everything is freed without it.


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, so that the process finishes its work before it exits."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def serve(
    app: ASGIApp,
    address: Address,
    stop: asyncio.Event,
    *,
    shutdown_seconds: float = 1.0,
    drain_seconds: float = 0.0,
    keep_alive_seconds: int = 90,
    most_connections: int = MOST_CONNECTIONS,
) -> None:
    """Serve until *stop*, then finish the requests in flight, in at most *shutdown_seconds*.

    For the first *drain_seconds*, new requests are served, too, and each response closes its connection. So a
    caller that reuses a connection gets no error. Raises ServerFailed if the server ends by itself.
    """
    in_flight: set[asyncio.Task[None]] = set()
    server = _server(_tracked(app, in_flight, stop), address, keep_alive_seconds, most_connections)
    stop_server: Callable[[], None] = server.stop  # Granian has no type for it.
    serving = asyncio.create_task(server.serve())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await asyncio.wait([serving], timeout=drain_seconds)
            stop_server()
            await asyncio.wait([serving], timeout=shutdown_seconds - drain_seconds)
            for task in in_flight:
                task.cancel()
            await asyncio.wait([serving], timeout=1.0)  # for cancelled requests to be answered
            serving.cancel()  # Only callers that do not read their responses are left.
            await asyncio.wait([serving])
    finally:
        stopping.cancel()
        stop_server()  # if this task was cancelled
        await asyncio.wait([serving], timeout=1.0)
    error = None if serving.cancelled() else serving.exception()
    if error or not stop.is_set():
        _log.critical("server_failed", reason=str(error or "it ended"))  # Granian's texts quote no values.
        raise ServerFailed from error


def _server(app: ASGIApp, address: Address, keep_alive_seconds: int, most_connections: int) -> Server:
    return Server(
        app,
        *address,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        websockets=False,
        backlog=1024,  # connections that wait to be accepted
        backpressure=most_connections,
        # hyper applies this time to the head of each request, and while it waits for one.
        http1_settings=HTTP1Settings(
            header_read_timeout=keep_alive_seconds * 1000, max_buffer_size=LARGEST_HEAD
        ),
        # Its log lines contain whole tracebacks, with values. `_tracked` logs what fails.
        log_enabled=False,
        log_dictconfig={"incremental": True, "handlers": {}, "loggers": {}},
    )


def _tracked(app: ASGIApp, in_flight: set[asyncio.Task[None]], stop: asyncio.Event) -> ASGIApp:
    """Return *app* with tasks in *in_flight*, failures logged, and connections closed after *stop*."""

    async def tracked(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        task = cast("asyncio.Task[None]", asyncio.current_task())
        if scope["type"] == "http":
            in_flight.add(task)
        try:
            await app(scope, receive, send_and_close if stop.is_set() else send)
        except Exception as error:
            _log.error("application_failed", scope=scope["type"], **logs.describe(error))
            raise
        finally:
            in_flight.discard(task)

    return tracked
