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
from service.errors import ErrorCode
from service.settings import InvalidSetting

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
        proxy_headers=False,  # Nobody asks who the client is.
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


class _HeadTooLarge(Exception):
    """The head of a request is larger than any that is sensible."""


class _Protocol(HttpToolsProtocol):
    """HTTP/1.1 as uvicorn speaks it; but what it refuses is answered and logged like everything else."""

    _head_size = 0  # bytes of the parts of this message's head that are complete
    _unfinished = 0  # bytes that came since the last complete part of a message
    _has_advanced = False  # whether these bytes completed one
    _latest: RequestResponseCycle | None = None  # the latest request with a complete head

    def data_received(self, data: bytes) -> None:
        """Read on, as long as the head is of bearable size."""
        self._has_advanced = False
        super().data_received(data)
        self._unfinished = 0 if self._has_advanced else self._unfinished + len(data)
        if self._head_size + self._unfinished > LARGEST_HEAD:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """Note that the head of a request begins."""
        self._head_size = 0
        self._has_advanced = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the first line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer."""
        self._count(len(name) + len(b": ") + len(value) + len(b"\r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Note which request is the latest."""
        super().on_headers_complete()
        self._latest = self.cycle

    def on_body(self, body: bytes) -> None:
        """Note that what came is no head."""
        self._has_advanced = True
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read: it is not HTTP, or too much."""
        if self._head_size > LARGEST_HEAD:
            self._refuse_head()
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "malformed_request", msg)

    def _count(self, size: int) -> None:
        self._has_advanced = True
        self._head_size += size
        if self._head_size > LARGEST_HEAD:
            raise _HeadTooLarge  # ends the parsing, as what is not HTTP does

    def _refuse_head(self) -> None:
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", "The headers are too large."
        )

    def _refuse(self, status: HTTPStatus, code: ErrorCode, message: str) -> None:
        if self.transport.is_closing():
            return
        latest = self._latest
        if latest is not None and not latest.response_complete and not latest.more_body:
            latest.keep_alive = False  # It is being served, and its answer comes first: and last.
            self.flow.pause_reading()
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
