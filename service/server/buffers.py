"""What is held of a connection: input that is not parsed yet, and output that is not sent yet."""

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

_LARGEST_JOINED = 16 * 1024  # bytes: copying more takes longer than a second system call


class UnparsedInput(FlowControl):
    """What was received and is not parsed yet. Reading stays paused while there is any."""

    unparsed = b""
    parsed_to = 0

    def resume_reading(self) -> None:
        """Read on, unless something is left to parse."""
        if not self.unparsed:
            super().resume_reading()


class JoinedWrites:
    """A transport that sends all that is written in one turn of the event loop in one system call.

    uvicorn writes the head and the body of an answer separately. The second call takes a tenth of the
    processor time of a create. A large body is not copied: many slow readers may share it.
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
