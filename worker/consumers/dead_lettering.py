"""Moves a message that can never be handled to the dead letters, with the reason in its headers."""

import structlog
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from worker.rabbitmq import topology
from worker.rabbitmq.copies import copy_of
from worker.rabbitmq.topology import Queue

_log = structlog.get_logger()


async def dead_letter(
    channel: AbstractChannel, message: AbstractIncomingMessage, queue: Queue, refusal: Exception
) -> None:
    """Publish a copy of a message to the dead letters of *queue*. Then the message may be acknowledged.

    In that order, so that a crash in between duplicates the message and never loses it. The reason in the
    headers is the class of *refusal*, and its text or else its docstring: neither quotes the message.

    *channel* must not share the message's connection: during an alarm RabbitMQ reads nothing from a
    connection that publishes, acknowledgements included. The confirm is waited for until a channel closes, at
    RabbitMQ's consumer timeout, half an hour, at the latest: giving up earlier during an alarm, or while the
    queue has no majority, would publish one more copy each time.
    """
    reason = type(refusal).__name__
    headers = {**message.headers, "x-reason": reason, "x-reason-text": str(refusal) or refusal.__doc__ or ""}
    copy = copy_of(message, headers)
    if len(copy.headers) < len(headers):
        _log.warning("headers_not_copied", number=len(headers) - len(copy.headers))
    exchange = await channel.get_exchange(topology.DEAD_LETTERS, ensure=False)
    await exchange.publish(copy, queue.dead_letters, mandatory=True)
    _log.warning("message_dead_lettered", reason=reason)
