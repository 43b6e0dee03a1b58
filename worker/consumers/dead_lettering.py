"""Moves messages that can never be handled to the dead letters, with the reason in their headers."""

import asyncio
from collections.abc import Sequence

from aio_pika import Message
from aio_pika.abc import AbstractIncomingMessage

from worker.batches import Outcome, Outcomes
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, open_channel
from worker.rabbitmq.copies import copy_of
from worker.rabbitmq.topology import Queue
from worker.settings import WorkerSettings


def dead_letter(message: AbstractIncomingMessage, refusal: Exception) -> Message:
    """Return a copy whose headers say why the message was refused.

    They hold the class of *refusal*, and its text or else its docstring: neither quotes the message.
    """
    reason = {"x-reason": type(refusal).__name__, "x-reason-text": str(refusal) or refusal.__doc__ or ""}
    return copy_of(message, {**message.headers, **reason})


async def publish(settings: WorkerSettings, queue: Queue, letters: Sequence[Message]) -> Outcomes:
    """Publish dead letters of *queue*. A message may be acknowledged once its copy is confirmed.

    In that order, so that a crash in between duplicates the message and never loses it.

    They have a connection of their own: during an alarm RabbitMQ reads nothing from a connection that
    publishes, acknowledgements included. Each waits for the confirm of the one before, so that at most one is
    published again after an alarm or a timeout.
    """
    outcomes: list[Outcome] = []
    try:
        async with (
            open_channel(settings, name=queue.dead_letters) as channel,
            asyncio.timeout(settings.broker_timeout_seconds),
        ):
            exchange = await channel.get_exchange(topology.DEAD_LETTERS, ensure=False)
            for letter in letters:
                await exchange.publish(letter, queue.dead_letters, mandatory=True)
                outcomes.append(None)
    except (BrokerUnavailable, *BROKER_ERRORS) as error:
        outcomes += [error] * (len(letters) - len(outcomes))
    return outcomes
