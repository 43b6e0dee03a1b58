"""HTTP/1.1 on one connection: uvicorn's protocol, with deadlines and a largest head."""

import asyncio
from http import HTTPStatus
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 10.0  # for a caller to send the head of a request
# To send its body, or to read some of an answer: as long as a slow network takes for the largest body.
BODY_SECONDS = 30.0
LARGEST_HEAD = 64 * 1024  # bytes of the request line and the headers: more than cookies and tokens need
_AROUND_HEADER = len(b": \r\n")

_NOT_HTTP = HTTPStatus.BAD_REQUEST, "The request is not valid HTTP."
_HEAD_OVERDUE = HTTPStatus.REQUEST_TIMEOUT, "The request line and headers did not arrive in time."
_HEAD_TOO_LARGE = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"The request line and headers are larger than {LARGEST_HEAD // 1024} KiB: send less.",
)


class JoinedWrites:
    """A transport that sends all that is written in one turn of the event loop in one system call.

    uvicorn writes the head and the body of an answer separately. The second call takes a tenth of the
    processor time of a create.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send *data* before the event loop waits again."""
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)

    def close(self) -> None:
        """Close the connection once everything has been sent."""
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else the transport has
        return getattr(self._transport, name)

    def _send(self) -> None:
        if self._held:
            joined = b"".join(self._held)
            self._held.clear()
            self._transport.write(joined)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with four differences.

    - Callers that send or read too slowly are cut off, see `end_if_overdue`.
    - The head of a request has a largest size.
    - The offer of another protocol is declined, and the body that follows it is read.
    - An answer is sent in one system call.

    What is no request yet is refused in plain text, without the application.
    """

    _reading: Literal["nothing", "head", "body"] = "nothing"  # the part of a message that is incomplete
    _deadline: float | None = None  # for what the caller has to send next; None while an answer is made
    _received = 0  # bytes since the read in which the latest head began
    _unread = 0  # bytes of our answers that the caller has not read
    _unread_since = 0.0  # when their number last changed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect the head of a request."""
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._deadline = self.loop.time() + HEAD_SECONDS

    def data_received(self, data: bytes) -> None:
        """Parse *data*. Refuse what is not HTTP, and too large a head, also an incomplete one."""
        self._received += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(*_NOT_HTTP)
        else:
            if self._reading == "head" and self._received > LARGEST_HEAD:
                self._refuse(*_HEAD_TOO_LARGE)

    def _parse(self, data: bytes) -> None:
        """Parse *data*, and decline every offer of another protocol (RFC 9110, section 7.8).

        Java's HttpClient offers HTTP/2 with each request. After an offer the parser leaves the rest to the
        other protocol: the body would be lost, or taken for the next request. So the parser is given a head
        again, with any request line and without the offer, and expects the body that the first one announced.
        The application has been started with the first: in state "body" the `on_…` methods ignore a head.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                rest = memoryview(rest)[offer.args[0] :]
                framing = [
                    name + b": " + value + b"\r\n"
                    for name, value in self.headers
                    if name in (b"content-length", b"transfer-encoding")
                ]
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
            else:
                return

    def on_message_begin(self) -> None:
        """Expect the rest of a head."""
        if self._reading != "body":
            self._reading = "head"
            self._received = 0
            self._deadline = self.loop.time() + HEAD_SECONDS
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Keep a part of the request line."""
        if self._reading == "head":
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are ignored: a gateway may have checked the headers only."""
        if self._reading == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, unless the head is too large, and expect the body."""
        if self._reading == "body":
            return
        size = len(self.url) + sum(len(name) + len(value) + _AROUND_HEADER for name, value in self.headers)
        if size > LARGEST_HEAD:
            self._refuse(*_HEAD_TOO_LARGE)
            raise httptools.HttpParserError  # stops the parser
        super().on_headers_complete()
        self._reading = "body"
        self._deadline = self.loop.time() + BODY_SECONDS

    def on_message_complete(self) -> None:
        """Stop the clock until the answer is sent; it may have been sent before the body was read."""
        if self.parser.should_upgrade():
            return  # The body follows: see `_parse`.
        self._reading = "nothing"
        self._deadline = self.loop.time() + self.timeout_keep_alive if self.cycle.response_complete else None
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
        """Cut off a caller that has been too slow to send the next part or to read its answers.

        A caller is not to blame while the server has paused reading. The application itself bounds the time
        for a body that it reads.
        """
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread != self._unread:
            self._unread, self._unread_since = unread, now
        elif now - self._unread_since >= BODY_SECONDS:
            self.transport.abort()  # close() would wait until the caller has read everything.
            return
        if self._deadline is None or now < self._deadline or self.flow.read_paused:
            return
        if self._reading == "head":
            self._refuse(*_HEAD_OVERDUE)
        elif self._reading == "nothing" or self.cycle.response_complete:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Answer what is no request, and close. An earlier request is answered first, and is the last."""
        if self.transport.is_closing():
            return
        latest: RequestResponseCycle | None = self.cycle  # None before the first, contrary to uvicorn's type
        if latest is not None and not latest.response_complete:
            is_its_body = self._reading == "body" and not self.pipeline and not latest.response_started
            if not is_its_body:
                latest.keep_alive = False
                self.flow.pause_reading()
                return
        head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        length = f"Content-Length: {len(reason)}\r\nConnection: close\r\n\r\n"
        self.transport.write(f"{head}{length}{reason}".encode())
        self.transport.close()
