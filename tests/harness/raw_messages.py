"""Messages whose properties no client of ours would write, though RabbitMQ carries them."""

import struct

from aio_pika import Message
from pamqp.commands import Basic

_SHORT = b"\x01\xe9"  # one byte of Latin-1


def _table(fields: bytes) -> bytes:
    return struct.pack(">I", len(fields)) + fields


_nested = b""
for _ in range(2_000):
    _nested = b"\x01nF" + _table(_nested)

# By what they are: the property, and its bytes.
UNDECODABLE = {
    **{f"{name} in Latin-1": (name, _SHORT) for name in ("content_type", "message_id", "app_id", "reply_to")},
    "type in Latin-1": ("message_type", _SHORT),
    "microseconds": ("timestamp", struct.pack(">Q", 1_700_000_000_000_000)),
    "nanoseconds": ("timestamp", struct.pack(">Q", 1_700_000_000_000_000_000)),
    "header's name in Latin-1": ("headers", _table(_SHORT + b"V")),
    "header beyond the year 9999": ("headers", _table(b"\x01tT" + struct.pack(">Q", 2**63 - 1))),
    "headers nested 2,000 deep": ("headers", _table(_nested)),
    "header of text in Latin-1": ("headers", _table(b"\x01aS" + struct.pack(">I", 1) + b"\xe9")),
    "header of 1e300": ("headers", _table(b"\x01ad" + struct.pack(">d", 1e300))),
    # With names of their own, because RabbitMQ 4 keeps one header of each name.
    "headers of 100 KB": ("headers", _table(b"".join(b"\x06%06dV" % number for number in range(12_500)))),
}


class NotText(str):
    __slots__ = ()

    def encode(self, encoding: str = "", errors: str = "strict") -> bytes:  # noqa: ARG002 - pamqp passes one
        """Return the text in Latin-1, whatever *encoding* is asked for."""
        return super().encode("latin-1", errors)


class RawMessage(Message):
    """A message with one property that is written as these bytes, and a message_id if one is given."""

    def __init__(self, body: bytes, name: str, written: bytes, *, message_id: str = "") -> None:
        super().__init__(body)
        parts = {"message_id": bytes([len(message_id)]) + message_id.encode()} if message_id else {}
        parts[name] = written
        flags = sum(Basic.Properties.flags[each] for each in parts)
        in_order = [parts[each] for each in Basic.Properties.attributes() if each in parts]
        object.__setattr__(self, "raw", struct.pack(">H", flags) + b"".join(in_order))

    @property
    def properties(self) -> Basic.Properties:
        return _Written(object.__getattribute__(self, "raw"))


class _Written(Basic.Properties):
    def __init__(self, written: bytes) -> None:
        super().__init__()
        self.written = written

    def marshal(self) -> bytes:
        return self.written
