"""Moves a message that can never be handled to the dead letters, with the reason in its headers."""

import asyncio

import structlog
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from worker.rabbitmq import topology
from worker.rabbitmq.alarm import is_blocked
from worker.rabbitmq.copies import copy_of
from worker.rabbitmq.topology import Queue

_log = structlog.get_logger()


async def dead_letter(
    channel: AbstractChannel,
    message: AbstractIncomingMessage,
    queue: Queue,
    refusal: Exception,
    *,
    seconds: float,
) -> None:
    """Publish a copy of a message to the dead letters of *queue*. Then the message may be acknowledged.

    In that order, so that a crash in between duplicates the message and never loses it. The reason in the
    headers is the class of *refusal*, and its text or else its docstring: neither quotes the message.
    *channel* must not share the message's connection: during an alarm RabbitMQ reads nothing from a
    connection that publishes, acknowledgements included.
    """
    reason = type(refusal).__name__
    headers = {**message.headers, "x-reason": reason, "x-reason-text": str(refusal) or refusal.__doc__ or ""}
    copy = copy_of(message, headers)
    if len(copy.headers) < len(headers):
        _log.warning("headers_not_copied", number=len(headers) - len(copy.headers))
    await publish_copy(channel, copy, queue, seconds=seconds)
    _log.warning("message_dead_lettered", reason=reason)


async def publish_copy(channel: AbstractChannel, copy: Message, queue: Queue, *, seconds: float) -> None:
    """Publish to the dead letters of *queue*, and wait for the confirm while an alarm lasts.

    Giving up during an alarm would publish one more copy with each attempt. Raises TimeoutError when the
    broker has not confirmed within *seconds*, counted from the end of the last alarm.
    """
    exchange = await channel.get_exchange(topology.DEAD_LETTERS, ensure=False)
    publishing = asyncio.create_task(exchange.publish(copy, queue.dead_letters, mandatory=True))
    was_blocked = False
    try:
        while not (await asyncio.wait([publishing], timeout=seconds))[0]:
            blocked = await is_blocked(channel)
            if channel.is_closed or not (blocked or was_blocked):
                raise TimeoutError
            was_blocked = blocked
        await publishing
    finally:
        publishing.cancel()  # The caller closes the channel after an error.
