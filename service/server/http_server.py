"""Serves an ASGI application on a socket until told to stop: for the API and for the worker's probes."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Literal

import httptools
import structlog
import uvicorn
from litestar.enums import HttpMethod
from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send, WebSocketReceiveMessage
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.api import access_log, response_headers
from service.api.envelope import Answer, ErrorCode, FieldError
from service.api.errors import BodyOverdue
from service.settings import InvalidSetting

LARGEST_HEAD = 64 * 1024  # of a request: its first line and its headers
_SPARE_FRAMING = 1024  # bytes of chunk extensions beyond as many as the body has
_OVERDUE = "body_overdue"  # in the state of a request whose body did not come in time


class ApplicationNotStarted(Exception):
    """The application failed before it could serve; its log says why."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises InvalidSetting when the port cannot be used."""
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
    app: ASGIApp,
    listening: socket.socket,
    stop: asyncio.Event,
    *,
    shutdown_seconds: float,
    head_seconds: float = 10.0,
    body_seconds: float = 30.0,
) -> None:
    """Serve until *stop*, then finish the requests under way, in *shutdown_seconds* at most.

    A caller has *head_seconds* to send the head of a request, and *body_seconds* more for its body.
    """
    config = uvicorn.Config(
        _ending_overdue_bodies(app),
        interface="asgi3",
        http=_Protocol,
        ws="none",
        proxy_headers=False,  # The address of the client is not used.
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
    )
    server = _Server(config, stop, head_seconds=head_seconds, body_seconds=body_seconds)
    await server.serve(sockets=[listening])
    if not server.started:
        raise ApplicationNotStarted


class _Server(uvicorn.Server):
    """A server that is part of a process: it leaves the signals alone, and stops by an event."""

    def __init__(
        self, config: uvicorn.Config, stop: asyncio.Event, *, head_seconds: float, body_seconds: float
    ) -> None:
        super().__init__(config)
        self._stop = stop
        self._head_seconds = head_seconds
        self._body_seconds = body_seconds

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        seconds = min(1.0, self._head_seconds, self._body_seconds)
        while not self._stop.is_set():
            await self.on_tick(0)  # Brings the date of the responses up to date.
            self._end_overdue()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stop.wait()

    def _end_overdue(self) -> None:
        """Look at every connection at once: a timer for each request would cost each of them."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, _Protocol):
                connection.end_if_overdue(
                    now, head_seconds=self._head_seconds, body_seconds=self._body_seconds
                )


def _ending_overdue_bodies(app: ASGIApp) -> ASGIApp:
    """Wrap *app* so that its wait for a body ends when the connection has waited long enough."""

    def call(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope.get("method") == HttpMethod.GET:
            return app(scope, receive, send)  # It reads no body, and need not pay for one.

        async def receive_in_time() -> HTTPReceiveMessage | WebSocketReceiveMessage:
            message = await receive()
            if _OVERDUE in scope["state"]:
                raise BodyOverdue
            return message

        return app(scope, receive_in_time, send)

    return call


class _HeadTooLarge(Exception):
    """The head of a request is larger than any that is sensible."""


class _Protocol(HttpToolsProtocol):
    """HTTP/1.1 as uvicorn speaks it; but what it refuses is answered and logged like everything else."""

    _part: Literal["gap", "head", "body"] = "gap"  # of a message that is being read; gap: between two
    _read_at = 0.0  # when the latest bytes came
    _waits_since: float | None = None  # for this part; None while the caller waits for us
    _head_size = 0  # bytes of the parts of this message's head that are complete
    _body_size = 0  # bytes of its body
    _unassigned = 0  # bytes that came and belong to neither: of an incomplete head, or around chunks
    _unread = 0  # bytes of our answers that the caller has not taken
    _unread_since = 0.0
    _latest: RequestResponseCycle | None = None  # the latest request with a complete head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect the head of a request."""
        super().connection_made(transport)
        self._waits_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        """Read on while the head, and the framing of the body, are not too large."""
        self._read_at = self.loop.time()
        self._unassigned += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._part == "gap":
            self._unassigned = 0
        elif self._part == "head":
            if self._head_size + self._unassigned > LARGEST_HEAD:
                self._refuse_head()
        elif self._unassigned > self._body_size + _SPARE_FRAMING:
            self._refuse(HTTPStatus.BAD_REQUEST, "malformed_request", "The chunk extensions are too large.")

    def _feed(self, data: bytes) -> None:
        """Have the parser read *data*, and decline each offer of another protocol (RFC 9110, section 7.8).

        Java's HttpClient offers HTTP/2 with each request. The parser leaves what follows to that protocol:
        the body would be lost, or read as the next request.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                rest = memoryview(rest)[offer.args[0] :]
                self._repeat_head()
            else:
                return

    def _repeat_head(self) -> None:
        """Have the parser expect the body of the request whose head it has read, and what comes after."""
        framing = [
            name + b": " + value + b"\r\n"
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")

    def on_message_begin(self) -> None:
        """Note that the head of a request begins; unless it is a repeated one."""
        if self._part == "body":
            return
        self._part = "head"
        self._waits_since = self._read_at
        self._head_size = self._body_size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the first line."""
        if self._part == "body":
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer, which is none: a gateway may have looked at the headers only."""
        self._count(len(name) + len(b": ") + len(value) + len(b"\r\n"))
        if self._part == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Note which request is the latest, and that its body comes next."""
        if self._part == "body":
            return
        super().on_headers_complete()
        self._latest = self.cycle
        self._part = "body"
        self._waits_since = self._read_at
        self._unassigned -= len(b"GET  HTTP/1.1\r\n\r\n")

    def on_chunk_header(self) -> None:
        """Count the least that a chunk has around it."""
        self._unassigned -= len(b"1\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Count a part of the body."""
        self._body_size += len(body)
        self._unassigned -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that all was read: now the caller waits, unless it has its answer already."""
        if self.parser.should_upgrade():
            return  # The body has yet to come.
        self._part = "gap"
        self._waits_since = self._read_at if self.cycle.response_complete else None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on as uvicorn does, but without a timer for the pause that follows: `end_if_overdue` ends it."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._part == "gap":
            self._waits_since = self.loop.time()

    def end_if_overdue(self, now: float, *, head_seconds: float, body_seconds: float) -> None:
        """Give up a caller that has taken too long to send the next part, or to read any of our answers.

        As long as reading is paused it is not the caller's fault.
        """
        if self._is_left_unread(now, body_seconds):
            self.transport.abort()  # To close it would wait until all is read.
            return
        if self._waits_since is None or self.flow.read_paused or self.transport.is_closing():
            return
        seconds = {"head": head_seconds, "body": body_seconds, "gap": self.timeout_keep_alive}[self._part]
        if self._latest is None:
            seconds = head_seconds  # of the first request, which has not begun, or has not gone far
        if now - self._waits_since < seconds:
            return
        if self._part == "head":
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "The head did not arrive in time.")
        elif self._part == "gap" or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False
            self.cycle.scope["state"][_OVERDUE] = True
            self.cycle.message_event.set()  # ends the application's wait for the body

    def _is_left_unread(self, now: float, seconds: float) -> bool:
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread != self._unread:
            self._unread, self._unread_since = unread, now
        return now - self._unread_since >= seconds

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read: it is not HTTP, or too much."""
        if self._head_size > LARGEST_HEAD:
            self._refuse_head()
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "malformed_request", msg)

    def _count(self, size: int) -> None:
        self._unassigned -= size
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
        if self._part == "body" and self.cycle.response_complete:
            self.transport.close()  # Its answer did not wait for the body.
            return
        if latest is not None and not latest.response_complete and not latest.more_body:
            latest.keep_alive = False  # It is being served, and its answer comes first: and last.
            self.flow.pause_reading()
            return
        if self.pipeline:
            self.flow.pause_reading()  # The latest has its turn, and its refusal, after the one being served.
            return
        request_id = response_headers.new_x_request_id()
        body = Answer.failed(status, [FieldError(code, message, None, None)]).body
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
