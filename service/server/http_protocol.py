"""HTTP/1.1 on one connection: uvicorn's protocol, with bounds on the memory and time of a caller."""

import asyncio
from http import HTTPStatus
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.server import limits
from service.server.limits import LARGEST_HEAD, MOST_HEADERS

_AROUND_HEADER = len(b": \r\n")
_LARGEST_JOINED = 16 * 1024  # bytes: copying more takes longer than a second system call

_NOT_HTTP = HTTPStatus.BAD_REQUEST, "The request is not valid HTTP."
_HEAD_OVERDUE = HTTPStatus.REQUEST_TIMEOUT, "The request line and headers did not arrive in time."
_HEAD_TOO_LARGE = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"There are more than {LARGEST_HEAD // 1024} KiB of headers, or more than {MOST_HEADERS}: send less.",
)
_UNKNOWN_CODING = HTTPStatus.NOT_IMPLEMENTED, "The only Transfer-Encoding that is served is chunked."
# The order in which connections are closed to make room: see `HttpProtocol.expendability`.
_IDLE, _SLOW, _BUSY = range(3)


class UnparsedInput(FlowControl):
    """Received bytes that are not parsed yet. Reading stays paused while there are any."""

    unparsed = b""
    parsed_to = 0

    def resume_reading(self) -> None:
        """Resume reading, unless bytes are left to parse."""
        if not self.unparsed:
            super().resume_reading()


class JoinedWrites:
    """A transport that sends all small writes of one turn of the event loop together.

    uvicorn writes the head and the body of a response separately, and the second system call takes a tenth
    of a create's processor time. Large bodies are not copied, because many slow readers may share one body.
    """

    written = 0  # bytes

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send *data* before the event loop waits again."""
        self.written += len(data)
        if len(data) > _LARGEST_JOINED:
            self._send()
            self._transport.write(data)
            return
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
    """uvicorn's HTTP/1.1 within the bounds of `limits`.

    While a request is in flight, at most one more waits on the connection; later input is not parsed. Input
    that is no request, or that another server could frame differently, is rejected in plain text.
    """

    flow: UnparsedInput
    _reading: Literal["nothing", "head", "body"] = "nothing"  # the part of a message that is incomplete
    _since = 0.0  # when we began to wait for the next part
    _deadline: float | None = None  # for that part; None while a request is in flight
    _received = 0  # bytes since a head or a body's last piece began; limited, because the parser keeps them
    _read_since, _read = 0.0, 0  # when we last counted how many bytes the caller has read, and that count

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect the head of a request. If there are too many connections, close one.

        The first choice is the connection that has been idle longest. The second is the connection whose
        caller has taken longest to send a request or read a response. The last is this connection.
        """
        self._writes = JoinedWrites(transport, self.loop)
        super().connection_made(self._writes)  # type: ignore[arg-type]
        self.flow = UnparsedInput(self.transport)
        self._expect(limits.HEAD_SECONDS)
        self._read_since = self._since
        if len(self.connections) > limits.MOST_CONNECTIONS:
            others = (
                each for each in self.connections if isinstance(each, HttpProtocol) and each is not self
            )
            longest = min(others, key=HttpProtocol.expendability)
            (self if longest.expendability()[0] == _BUSY else longest).cut_off()

    def expendability(self) -> tuple[int, float]:
        """Return a sort key: to make room, the connection with the lowest key is closed first."""
        if self.unread:
            return _SLOW, self._read_since
        if self._deadline is None:
            return _BUSY, 0.0
        return _IDLE if self._reading == "nothing" else _SLOW, self._since

    def cut_off(self) -> None:
        """Drop the connection, even if its caller has not read everything."""
        self.connections.discard(self)
        self.transport.abort()

    def _expect(self, seconds: float) -> None:
        """Set the deadline for the next part that the caller has to send."""
        self._since = self.loop.time()
        self._deadline = self._since + seconds

    def data_received(self, data: bytes) -> None:
        """Parse *data*, at once or after earlier requests on this connection have been answered."""
        self.flow.unparsed = self.flow.unparsed[self.flow.parsed_to :] + data
        self.flow.parsed_to = 0
        self._parse_received()

    def _parse_received(self) -> None:
        """Parse until a request waits behind another. Reject what is not HTTP, and heads that are too large.

        The parser gets at most one end of a head at a time, so that it starts at most one request. Otherwise
        one read of 256 KiB could start 14,000 requests.
        """
        data, start = self.flow.unparsed, self.flow.parsed_to
        while start < len(data):
            if self.pipeline:
                self.flow.parsed_to = start
                self.flow.pause_reading()
                return
            mark = b"\n" if self._reading == "head" else b"\r\n\r\n"
            found = data.find(mark, start)
            is_last = found < 0 or data.find(mark, found + len(mark)) < 0
            end = len(data) if is_last else found + len(mark)
            self._received += end - start
            try:
                self._parse(memoryview(data)[start:end])
            except httptools.HttpParserError:
                self._refuse(*_NOT_HTTP)
                break
            if self._reading != "nothing" and (
                self._received > LARGEST_HEAD or len(self.headers) > MOST_HEADERS
            ):
                self._refuse(*_HEAD_TOO_LARGE)
                break
            start = end
        self.flow.unparsed = b""

    def _parse(self, data: memoryview) -> None:
        """Parse *data*, and decline every offer of another protocol (RFC 9110, section 7.8).

        Java's HttpClient offers HTTP/2 with each request. After an offer the parser leaves the rest to the
        other protocol, so the body would be lost, or parsed as the next request. So we feed the parser a
        second head that announces the same body, without the offer. The application was started with the
        first head, and while a body is read, the `on_…` methods ignore the second head.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
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
            self._expect(limits.HEAD_SECONDS)
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Keep a part of the request line."""
        if self._reading == "head":
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are ignored, because a gateway may have checked only the headers."""
        if self._reading == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application and expect the body, unless the head is too large or ambiguous."""
        if self._reading == "body":
            return
        size = len(self.url) + sum([len(name) + len(value) + _AROUND_HEADER for name, value in self.headers])
        hosts = len([name for name, _ in self.headers if name == b"host"])
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        refusal = None
        if size > LARGEST_HEAD or len(self.headers) > MOST_HEADERS:
            refusal = _HEAD_TOO_LARGE
        elif hosts != 1 and (hosts or self.parser.get_http_version() == "1.1"):
            refusal = _NOT_HTTP  # RFC 9112, section 3.2
        elif codings and codings != [b"chunked"]:
            refusal = _UNKNOWN_CODING
        if refusal:
            self._refuse(*refusal)
            raise httptools.HttpParserError  # stops the parser
        super().on_headers_complete()
        self._reading = "body"
        self._expect(limits.BODY_SECONDS)

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body. Framing or trailers after it may be as large as a head."""
        self._received = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Clear the deadline until the response is sent. If it has been sent already, expect a request."""
        if self.parser.should_upgrade():
            return  # The parser has not seen the body yet: see `_parse`.
        self._reading = "nothing"
        if self.cycle.response_complete:
            self._expect(self.timeout_keep_alive)
        else:
            self._deadline = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Do what uvicorn does, except for its keep-alive timer, which costs time on every request."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._reading == "nothing":
            self._expect(self.timeout_keep_alive)
        if self.flow.unparsed:
            self._parse_received()
        self.flow.resume_reading()

    def end_if_overdue(self, now: float) -> None:
        """Cut off a caller that has been too slow to send the next part or to read its responses.

        While the server has paused reading, the caller is not at fault. If a body is late, the application
        itself answers.
        """
        read = self._writes.written - self.unread
        if not self.unread or now - self._read_since >= limits.BODY_SECONDS:
            if self.unread and read - self._read < limits.LEAST_READ:
                self.cut_off()  # close() would wait until all is read.
                return
            self._read, self._read_since = read, now
        if self._deadline is None or now < self._deadline or self.flow.read_paused:
            return
        if self._reading == "head":
            self._refuse(*_HEAD_OVERDUE)
        elif self._reading == "nothing" or self.cycle.response_complete:
            self.transport.close()

    @property
    def unread(self) -> int:
        """The number of bytes of our responses that the caller has not read."""
        return self.transport.get_write_buffer_size()

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Reject invalid input, and close. If an earlier request is in flight, answer only that request."""
        if self.transport.is_closing():
            return
        latest: RequestResponseCycle | None = self.cycle  # None before the first request, despite its type
        if latest is not None and not latest.response_complete:
            is_its_body = self._reading == "body" and not self.pipeline and not latest.response_started
            if not is_its_body:
                latest.keep_alive = False
                self.flow.pause_reading()
                return
        elif self._reading == "body":
            self.transport.close()  # The request has been answered.
            return
        head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        length = f"Content-Length: {len(reason)}\r\nConnection: close\r\n\r\n"
        self.transport.write(f"{head}{length}{reason}".encode())
        self.transport.close()
