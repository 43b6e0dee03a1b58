"""Encodes an event as the AMQP frames that publish it (AMQP 0-9-1, sections 2.3.5 and 4.2).

pamqp takes several times as long, because it can encode any message. This module encodes only events, which
all have the same properties. A test checks that pamqp produces the same bytes.
"""

import struct
from functools import lru_cache

import pamqp.frame
from aio_pika import DeliveryMode
from aiormq import spec
from pamqp import encode

from service.outbox import events
from worker.relay.outbox_tables import OutboxRow

UNENCODABLE = (ValueError, TypeError, struct.error)  # raised for an event that AMQP cannot carry

_HEADER, _BODY, _END = 2, 3, b"\xce"  # two types of frames, and the octet that ends a frame
_FRAME = struct.Struct(">BHI")  # type, channel, size
_CONTENT = struct.Struct(">HHQH")  # class, weight, body size, property flags
_LONG = struct.Struct(">I")
_TIMESTAMP = struct.Struct(">Q")
_BASIC = 60  # the AMQP class of a publish
_FLAGS = sum(
    spec.Basic.Properties.flags[name]
    for name in ("content_type", "headers", "delivery_mode", "message_id", "timestamp", "message_type")
)


def encode_event(row: OutboxRow, event_id: str, *, exchange: str, channel: int, longest_body: int) -> bytes:
    """Return the frames that publish an event as a persistent message.

    A frame has at most *longest_body* bytes of the body. As in aiormq, 0 or less means no limit.
    Raises one of UNENCODABLE if AMQP cannot carry the event.
    """
    fields = b"".join(
        (
            _field("cloudEvents:id", event_id),
            _ALWAYS,
            _field("cloudEvents:subject", event_id.partition(".")[0]),
            _field("cloudEvents:type", row.type),
            _field_name("sequence"),
            encode.encode_table_value(row.sequence),
            b"" if row.traceparent is None else _field("traceparent", row.traceparent),
        )
    )
    content = b"".join(
        (
            _CONTENT.pack(_BASIC, 0, len(row.payload), _FLAGS),
            _CONTENT_TYPE,
            _LONG.pack(len(fields)),
            fields,
            _PERSISTENT,
            _short(event_id),
            _TIMESTAMP.pack(int(row.created_at.timestamp())),
            _short(row.type),
        )
    )
    step = longest_body if longest_body > 0 else len(row.payload) or 1
    pieces = [row.payload[start : start + step] for start in range(0, len(row.payload), step)]
    return b"".join(
        (
            _publish(exchange, row.type, channel),
            _frame(_HEADER, channel, content),
            *(_frame(_BODY, channel, piece) for piece in pieces),
        )
    )


@lru_cache(maxsize=64)
def _publish(exchange: str, event_type: str, channel: int) -> bytes:
    method = spec.Basic.Publish(
        exchange=exchange, routing_key=event_type, mandatory=event_type in events.MUST_BE_ROUTED
    )
    return pamqp.frame.marshal(method, channel)


def _frame(kind: int, channel: int, content: bytes) -> bytes:
    return b"".join((_FRAME.pack(kind, channel, len(content)), content, _END))


def _field(name: str, value: str) -> bytes:
    encoded = value.encode()
    return b"".join((_field_name(name), b"S", _LONG.pack(len(encoded)), encoded))


@lru_cache(maxsize=16)
def _field_name(name: str) -> bytes:
    return _short(name)


def _short(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > 255:
        raise ValueError("longer than 255 bytes")
    return bytes((len(encoded),)) + encoded


_CONTENT_TYPE = _short(events.CONTENT_TYPE)
_PERSISTENT = bytes((DeliveryMode.PERSISTENT,))
_ALWAYS = _field("cloudEvents:source", events.SOURCE) + _field("cloudEvents:specversion", events.SPECVERSION)
