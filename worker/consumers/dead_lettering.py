"""Moves messages to the dead letters, with the reason in their headers. consumer.py decides which ones."""

import asyncio
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractIncomingMessage
from pamqp.encode import field_table

from worker.batches import Failure, Failures
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, open_channel
from worker.rabbitmq.topology import Queue
from worker.settings import WorkerSettings

# RabbitMQ would route a copy by these headers, too, but the copy must go to one queue only.
_ROUTING = ("CC", "BCC")
_SENDER = "x-user-id"


def dead_letter(message: AbstractIncomingMessage, refusal: Exception) -> Message:
    """Return a copy whose headers say why the message was refused, for other teams to read.

    The headers have the class of *refusal* and its text, which does not quote the message. The sender's
    `user_id`, which RabbitMQ has checked, becomes the header `x-user-id`. The message's own `x-user-id` is
    left out, because any sender can set it. So the next dead letter of a redriven message names no sender.
    """
    headers = {name: value for name, value in message.headers.items() if name.lower() != _SENDER}
    headers |= {"x-reason": type(refusal).__name__, "x-reason-text": str(refusal)}
    if message.user_id:
        headers[_SENDER] = message.user_id
    return copy_of(message, headers)


async def publish(settings: WorkerSettings, queue: Queue, letters: Sequence[Message]) -> Failures:
    """Publish dead letters of *queue*. The caller acknowledges a message only after its copy is confirmed.

    So a crash may duplicate a message but never lose it. Dead letters have a connection of their own, because
    during an alarm RabbitMQ reads nothing from a publishing connection, not even acknowledgements. A dead
    letter is published only after the previous dead letter is confirmed, so at most one dead letter is
    published again after an alarm or a timeout. All confirms together may take BROKER_TIMEOUT_SECONDS. A
    message whose copy is not confirmed by then returns to its queue.
    """
    failures: list[Failure] = []
    try:
        async with (
            open_channel(settings, name=queue.dead_letters) as channel,
            asyncio.timeout(settings.broker_timeout_seconds),
        ):
            exchange = await channel.get_exchange(topology.DEAD_LETTERS, ensure=False)
            for letter in letters:
                # Raises an error if no queue takes the letter, because the channel has on_return_raises.
                await exchange.publish(letter, queue.dead_letters, mandatory=True)
                failures.append(None)
    except (BrokerUnavailable, *BROKER_ERRORS) as error:
        failures += [error] * (len(letters) - len(failures))
    return failures


def copy_of(message: AbstractIncomingMessage, headers: Mapping[str, Any]) -> Message:
    """Return a persistent copy with these headers, routed by its routing key alone.

    Headers that the library cannot write are left out. So are three properties: an expiration would delete a
    dead letter early, a priority would change the order, and the broker refuses another user's user_id.
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
    """Leave out headers that cannot be written, such as text that is not UTF-8 or a large float."""
    writable = {}
    for name, value in headers.items():
        try:
            field_table({name: value})
        except (TypeError, ValueError, OverflowError, struct.error):
            continue
        writable[name] = value
    return writable
