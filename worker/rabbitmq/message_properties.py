"""Decodes message properties one by one. A header names the properties that cannot be used.

pamqp's error for a bad property ends the connection, and RabbitMQ delivers all in-flight messages again. So
one malformed message could bring all others to the delivery limit. aio-pika cannot construct a message with a
delivery_mode above 2, which RabbitMQ 4 delivers: it would count towards the prefetch forever. pamqp cannot
write all headers that it can read, so they could not be copied to a dead letter.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

from pamqp import decode, encode
from pamqp.commands import Basic

UNDECODABLE: Final = "x-undecodable"  # the header that names the properties left out

# Longer headers count as undecodable. pamqp's time grows with the square of the length: 3 s for 128 KiB.
_LONGEST_BYTES = 16_384
_DECODERS = {**decode.METHODS}
# Each raises an error for a value that aio-pika or pamqp cannot use.
_CHECKS: Final[dict[str, Callable[[Any], object]]] = {
    "delivery_mode": range(3).index,
    "expiration": float,
    "headers": encode.field_table,
}


def decode_tolerantly() -> None:
    """Patch pamqp for all connections of this process. A test checks that the patch fits pamqp's release."""
    decode.METHODS["shortstr"] = _short_text
    setattr(Basic.Properties, "unmarshal", _unmarshal)  # noqa: B010 - mypy lets no method be assigned


def _short_text(data: bytes) -> tuple[int, str]:
    """Read a short string in an AMQP method frame, such as a routing key."""
    size = 1 + data[0]
    return size, data[1:size].decode(errors="backslashreplace")


def _unmarshal(properties: Basic.Properties, flags: int, data: bytes) -> None:
    undecodable = []
    for name in properties.attributes():
        if flags & properties.flags[name]:
            kind = properties.amqp_type(name)
            size = _size(kind, data)
            try:
                value = _DECODERS[kind](data[: min(size, _LONGEST_BYTES)])[1]
                if check := _CHECKS.get(name):
                    check(value)
                setattr(properties, name, value)
            except (ValueError, TypeError, OverflowError, RecursionError, struct.error):
                undecodable.append(name)
            data = data[size:]
    if undecodable:
        properties.headers = {**(properties.headers or {}), UNDECODABLE: ", ".join(undecodable)}


def _size(kind: str, data: bytes) -> int:
    match kind:
        case "shortstr":
            return 1 + data[0]
        case "table":
            return 4 + int.from_bytes(data[:4], "big")
        case "timestamp":
            return 8
        case _:
            return 1
