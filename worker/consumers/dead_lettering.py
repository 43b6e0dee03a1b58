"""Moves messages to the dead letters, with the reason in their headers. consumer.py decides which ones."""

import asyncio
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, cast

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractIncomingMessage
from aiormq.exceptions import DeliveryError

from worker.batches import Failures, TryAgain
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, open_channel
from worker.rabbitmq.topology import Queue
from worker.settings import WorkerSettings

# RabbitMQ would route a copy by these headers, too, but the copy must go to one queue only.
_ROUTING = ("CC", "BCC")
SENDER = "x-user-id"


def dead_letter(message: AbstractIncomingMessage, refusal: Exception) -> Message:
    """Return a copy whose headers say why the message was refused, for other teams to read.

    The text of *refusal* does not quote the message. The sender's `user_id`, which RabbitMQ has checked,
    becomes the header `x-user-id`. The message's own is left out, because any sender can set it. So the next
    dead letter of a redriven message names no sender.
    """
    headers = {name: value for name, value in message.headers.items() if name.lower() != SENDER}
    headers |= {"x-reason": type(refusal).__name__, "x-reason-text": str(refusal)}
    if message.user_id:
        headers[SENDER] = message.user_id
    return copy_of(message, headers)


async def publish_letters(settings: WorkerSettings, queue: Queue, letters: Sequence[Message]) -> Failures:
    """Publish dead letters of *queue*. A message may be acknowledged only after its copy is confirmed.

    The messages whose copies are not confirmed in BROKER_TIMEOUT_SECONDS return to their queue. Those whose
    copies are refused are retried: at the delivery limit, RabbitMQ 3.10 would move them no more. The letters
    have a connection of their own, because during an alarm RabbitMQ reads nothing from a publishing
    connection, not even acknowledgements.
    """
    confirmed = 0
    failure: Exception = TryAgain("the dead-letter queue is full, or is not bound")
    try:
        async with (
            open_channel(settings, name=queue.dead_letters) as channel,
            asyncio.timeout(settings.broker_timeout_seconds),
        ):
            exchange = await channel.get_exchange(topology.DEAD_LETTERS, ensure=False)
            # Raises an error if no queue takes the letter, because the channel has on_return_raises.
            send = partial(exchange.publish, routing_key=queue.dead_letters, mandatory=True)
            # The first letter finds out whether an alarm blocks the connection. RabbitMQ reads what has been
            # sent when the alarm ends, even if we have given up. It confirms only an empty letter.
            await send(letters[0])
            confirmed = 1
            await (await channel.get_underlay_channel()).connection.ready()
            outcomes = await asyncio.gather(*map(send, letters[1:]), return_exceptions=True)
            # aiormq matches returned letters by message_id, and other teams may repeat an id. So if one
            # letter fails, any of them may have failed.
            if not any(isinstance(outcome, BaseException) for outcome in outcomes):
                confirmed = len(letters)
    except (BrokerUnavailable, *BROKER_ERRORS) as error:
        failure = failure if isinstance(error, DeliveryError) else error
    return [None] * confirmed + [failure] * (len(letters) - confirmed)


def copy_of(message: AbstractIncomingMessage, headers: Mapping[str, Any]) -> Message:
    """Return a persistent copy with these headers, routed by its routing key alone.

    Three properties are dropped: expiration (early deletion), priority (order), user_id (of another user).
    """
    copied = cast("Message", copy(message))
    copied.headers = {name: value for name, value in headers.items() if name not in _ROUTING}
    copied.expiration = copied.priority = copied.user_id = None
    copied.delivery_mode = DeliveryMode.PERSISTENT
    return copied
