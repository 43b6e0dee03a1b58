"""HTTP/1.1 on one connection: uvicorn's protocol, with deadlines, limits, and refusals by the application."""

import asyncio
from collections.abc import Awaitable
from typing import Literal

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.server.asgi import ASGIApp, Message, Receive, Scope, Send
from service.server.joined_writes import JoinedWrites
from service.server.refusals import (
    HEAD_OVERDUE,
    HEAD_TOO_LARGE,
    LARGEST_HEAD,
    MALFORMED_REQUEST,
    BodyOverdue,
    MalformedFraming,
    Refusal,
    Refuse,
)

_SPARE_FRAMING = 1024  # bytes of chunk extensions and trailers, beyond as many as the body has
_BODY_ERROR = "body_error"  # key in a request's state: the exception with which reading its body fails


class HttpConfig(uvicorn.Config):
    """uvicorn's settings, and those that it lacks."""

    refuse: Refuse  # answers what cannot be read as a request
    head_seconds: float  # for a caller to send the head of a request
    body_seconds: float  # to send its body, or to read some of an answer


def failing_on_body_errors(app: ASGIApp) -> ASGIApp:
    """Wrap *app* so that reading a body raises the error that the connection has found in it."""

    def call(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope.get("method") == "GET":
            return app(scope, receive, send)  # A GET reads no body, and should not pay for the wrapper.

        async def receive_or_fail() -> Message:
            message = await receive()
            if error := scope["state"].get(_BODY_ERROR):
                raise error
            return message

        return app(scope, receive_or_fail, send)

    return call


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with five differences.

    - Callers that send or read too slowly are refused or cut off, see `end_if_overdue`.
    - The head of a request, and the framing of its body, have a largest size.
    - A request that cannot be read is answered by `HttpConfig.refuse`, not by uvicorn's plain text.
    - The offer of another protocol is declined, and the body that follows it is read.
    - An answer is sent in one system call.
    """

    config: HttpConfig

    _reading: Literal["nothing", "head", "body"] = "nothing"  # the part of a message that is incomplete
    _read_at = 0.0  # when the latest bytes arrived
    _deadline: float | None = None  # for what the caller has to send next; None while an answer is made
    _head_size = 0  # bytes of the head that the parser has reported
    _body_size = 0  # bytes of the body
    _unreported = 0  # bytes received that are neither: an incomplete header, or the framing of chunks
    _unread = 0  # bytes of our answers that the caller has not read
    _unread_since = 0.0  # when their number last changed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect the head of a request."""
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._deadline = self.loop.time() + self.config.head_seconds

    def data_received(self, data: bytes) -> None:
        """Parse *data*; refuse too large a head or framing, also an incomplete one."""
        self._read_at = self.loop.time()
        self._unreported += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(HEAD_TOO_LARGE if self._head_size > LARGEST_HEAD else MALFORMED_REQUEST)
            return
        if self._reading == "nothing":
            self._unreported = 0
        elif self._reading == "head":
            if self._head_size + self._unreported > LARGEST_HEAD:
                self._refuse(HEAD_TOO_LARGE)
        elif self._unreported > self._body_size + _SPARE_FRAMING:
            self._refuse(MALFORMED_REQUEST)

    def _parse(self, data: bytes) -> None:
        """Parse *data*, and decline every offer of another protocol (RFC 9110, section 7.8).

        Java's HttpClient offers HTTP/2 with each request. The parser leaves the bytes after an offer to the
        other protocol: the body would be lost, or taken for the next request.
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
        """Feed the parser the head that it has just read, without the offer, so that it expects the body."""
        framing = [
            name + b": " + value + b"\r\n"
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")

    def on_message_begin(self) -> None:
        """Expect the rest of a head, unless `_repeat_head` is feeding one: then the body has begun."""
        if self._reading == "body":
            return
        self._reading = "head"
        self._deadline = self._read_at + self.config.head_seconds
        self._head_size = self._body_size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the request line."""
        if self._reading == "head":
            self._head_size += len(url)
            self._unreported -= len(url)
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header. Trailers are ignored: a gateway may have checked the headers only."""
        if self._reading == "head":
            size = len(name) + len(b": ") + len(value) + len(b"\r\n")
            self._head_size += size
            self._unreported -= size
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, unless the head is too large, and expect the body."""
        if self._reading == "body":
            return
        if self._head_size > LARGEST_HEAD:
            raise httptools.HttpParserError  # stops the parser
        super().on_headers_complete()
        self._reading = "body"
        self._deadline = self._read_at + self.config.body_seconds
        self._unreported -= len(b"GET  HTTP/1.1\r\n\r\n")

    def on_chunk_header(self) -> None:
        """Allow the least framing that a chunk has."""
        self._unreported -= len(b"1\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Count a part of the body."""
        self._body_size += len(body)
        self._unreported -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the clock until the answer is sent; it may have been sent before the body was read."""
        if self.parser.should_upgrade():
            return  # The body follows the offer of another protocol.
        self._reading = "nothing"
        self._deadline = self._read_at + self.timeout_keep_alive if self.cycle.response_complete else None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Do as uvicorn does, but without its timer for an idle connection, which costs every request."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._reading == "nothing":
            self._deadline = self.loop.time() + self.timeout_keep_alive

    def end_if_overdue(self, now: float) -> None:
        """Refuse or cut off a caller that has been too slow to send the next part or to read its answers.

        A caller is not to blame while the server has paused reading.
        """
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread != self._unread:
            self._unread, self._unread_since = unread, now
        elif now - self._unread_since >= self.config.body_seconds:
            self.transport.abort()  # close() would wait until the caller has read everything.
            return
        if self._deadline is None or now < self._deadline or self.flow.read_paused:
            return
        if self._reading == "head":
            self._refuse(HEAD_OVERDUE)
        elif self._reading == "body":
            self._fail_body(BodyOverdue())
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Refuse what the caller is sending, after the answer to an earlier request; then close."""
        latest: RequestResponseCycle | None = self.cycle  # None before the first, contrary to uvicorn's type
        if self.transport.is_closing():
            return
        if self._reading == "body":
            self._fail_body(MalformedFraming())
        elif latest is not None and not latest.response_complete:
            latest.keep_alive = False  # Its answer is the last.
            self.flow.pause_reading()
        else:
            self._answer(self.config.refuse(refusal))

    def _fail_body(self, error: Exception) -> None:
        """Have the application fail with *error* when it reads the body; then close."""
        if self.cycle.response_complete:
            self.transport.close()  # The application answered without reading the body.
            return
        self.cycle.keep_alive = False
        self.cycle.scope["state"][_BODY_ERROR] = error
        self.cycle.message_event.set()

    def _answer(self, app: ASGIApp) -> None:
        """Answer with *app*, then close. uvicorn writes the answer: the parser is fed a request for it."""
        self.flow.pause_reading()
        self.app = app
        self._reading = "nothing"
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"GET / HTTP/1.0\r\n\r\n")
