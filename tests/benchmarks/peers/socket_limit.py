"""The limit of one channel: `socket_limit.py FILE COUNT` sends frames encoded in advance and counts confirms.

At most UNCONFIRMED messages are unconfirmed, as with any publisher that avoids being throttled.
"""

import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from message import AMQP_URL, EXCHANGE, ROUTING_KEY, event_id, properties
from pamqp import commands, frame, header
from pamqp.body import ContentBody

CHUNK = 250  # messages sent at once
UNCONFIRMED = 2_000  # at most
_FRAME_HEAD = struct.Struct(">BHI")
_CONFIRM = struct.Struct(">HHQB")
_METHOD, _BASIC, _ACK = 1, 60, 80


class Link:
    """A connection to the broker with one channel in confirm mode."""

    def __init__(self) -> None:
        url = urlsplit(AMQP_URL)
        self._socket = socket.create_connection((url.hostname, url.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._next()
        login = f"\0{url.username}\0{url.password}"
        self.send(0, commands.Connection.StartOk(mechanism="PLAIN", response=login, locale="en_US"))
        self._next()
        self.send(0, commands.Connection.TuneOk(channel_max=1, frame_max=131_072, heartbeat=0))
        self.send(0, commands.Connection.Open())
        self._next()
        for opening in (commands.Channel.Open(), commands.Confirm.Select()):
            self.send(1, opening)
            self._next()

    def send(self, channel: int, method: commands.Connection.Open) -> None:
        """Send one method."""
        self._socket.sendall(frame.marshal(method, channel))

    def sendall(self, frames: bytes) -> None:
        """Send encoded frames."""
        self._socket.sendall(frames)

    def confirmed(self) -> int:
        """Wait for frames, and return the highest delivery tag in them; tags are confirmed in order."""
        highest = 0
        for kind, body in self._frames():
            if kind == _METHOD:
                class_id, method_id, tag, _ = _CONFIRM.unpack_from(body)
                assert (class_id, method_id) == (_BASIC, _ACK), f"not an ack: {class_id}.{method_id}"
                highest = max(highest, tag)
        return highest

    def _next(self) -> None:
        while not list(self._frames()):
            pass

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        self._received += self._socket.recv(1 << 16)
        start = 0
        while len(self._received) - start >= _FRAME_HEAD.size:
            kind, _, size = _FRAME_HEAD.unpack_from(self._received, start)
            end = start + _FRAME_HEAD.size + size + 1
            if end > len(self._received):
                break
            yield kind, self._received[start + _FRAME_HEAD.size : end - 1]
            start = end
        self._received = self._received[start:]


def encoded(payload: bytes, numbers: range) -> bytes:
    """Return the frames of some messages."""
    id_ = event_id(payload)
    return b"".join(
        frame.marshal(part, 1) for number in numbers for part in _message(payload, f"{id_}.{number}")
    )


def _message(payload: bytes, id_: str) -> Iterator[object]:
    names = properties(id_)
    names["message_type"] = names.pop("type")
    yield commands.Basic.Publish(exchange=EXCHANGE, routing_key=ROUTING_KEY, mandatory=True)
    yield header.ContentHeader(body_size=len(payload), properties=commands.Basic.Properties(**names))
    yield ContentBody(payload)


def main(payload: bytes, count: int) -> None:
    """Encode, then publish *count* messages, then wait to be killed."""
    chunks = [encoded(payload, range(start, min(start + CHUNK, count))) for start in range(0, count, CHUNK)]
    link = Link()
    sent = confirmed = 0
    for chunk in chunks:
        while sent - confirmed > UNCONFIRMED - CHUNK:
            confirmed = max(confirmed, link.confirmed())
        link.sendall(chunk)
        sent = min(sent + CHUNK, count)
    while confirmed < count:
        confirmed = max(confirmed, link.confirmed())
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_bytes(), int(sys.argv[2]))
