"""Serves an ASGI application on a socket until told to stop: for the API and for the worker's probes."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus

import structlog
import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service import access_log, envelope
from service.settings import InvalidSetting
from service.submissions import ErrorCode

LARGEST_HEAD = 64 * 1024  # of a request: its first line and its headers


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
        http=_Protocol,
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


class _Protocol(HttpToolsProtocol):
    """HTTP/1.1 as uvicorn speaks it; but what it refuses is answered and logged like everything else."""

    _head_size: int | None = None  # None while no head is being read
    _latest: RequestResponseCycle | None = None  # the latest request with a complete head

    def data_received(self, data: bytes) -> None:
        """Read on, to the end of a head of bearable size."""
        super().data_received(data)
        if self._head_size is None:
            return
        self._head_size += len(data)
        if self._head_size > LARGEST_HEAD:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", "The headers are too large."
            )

    def on_message_begin(self) -> None:
        """Note that the head of a request begins."""
        self._head_size = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note that it ends."""
        self._head_size = None
        super().on_headers_complete()
        self._latest = self.cycle

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP; if it follows a request that is being served, that one gets its answer."""
        latest = self._latest
        if latest is not None and not latest.response_complete and not latest.more_body:
            latest.keep_alive = False
            return
        self._refuse(HTTPStatus.BAD_REQUEST, "malformed_request", msg)

    def _refuse(self, status: HTTPStatus, code: ErrorCode, message: str) -> None:
        if self.transport.is_closing():
            return
        request_id = access_log.new_request_id()
        body = envelope.encode_failure(status, code, message)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", request_id),
        ]
        lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()
        with structlog.contextvars.bound_contextvars(request_id=request_id.decode()):
            access_log.record(None, None, int(status), 0.0)
