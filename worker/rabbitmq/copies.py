"""Copies of messages with other headers, for moving them to the dead letters and back."""

import struct
from collections.abc import Mapping
from typing import Any

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractIncomingMessage
from pamqp.encode import field_table

# RabbitMQ also routes a message by the keys in these headers, as its sender wanted. A copy goes to one queue.
_ROUTING = ("CC", "BCC")


def copy_of(message: AbstractIncomingMessage, headers: Mapping[str, Any]) -> Message:
    """Return a persistent copy with these headers, routed by its routing key alone.

    Headers that the library can read but not write are left out.
    """
    return Message(
        message.body,
        headers=_writable({name: value for name, value in headers.items() if name not in _ROUTING}),
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        message_id=message.message_id,
        timestamp=message.timestamp,
        type=message.type,
        app_id=message.app_id,
        delivery_mode=DeliveryMode.PERSISTENT,
    )


def _writable(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out headers that cannot be written, such as text that is not UTF-8 or a large double."""
    writable = {}
    for name, value in headers.items():
        try:
            field_table({name: value})
        except (TypeError, ValueError, OverflowError, struct.error):
            continue
        writable[name] = value
    return writable
