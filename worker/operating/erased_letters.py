"""Removes the dead letters that mention erased requests."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from uuid import UUID

import structlog
from aio_pika.abc import AbstractConnection, AbstractIncomingMessage

from service.identifiers import parse_uuid
from worker.operating import dead_letter_queues
from worker.operating.answers import OperatorError
from worker.operating.dead_letter_queues import DEFAULT_LIMITS, QUEUES, Limits
from worker.rabbitmq.topology import Queue

_LONGEST_QUEUE = 65_535  # the largest prefetch count
_UUID = re.compile(rb"req_[0-9A-Za-z]{22}")

_log = structlog.get_logger()


class TooManyDeadLetters(OperatorError):
    """Not all dead letters could be searched: there are too many. Redrive some, then run this again."""


FindErased = Callable[[Collection[UUID]], Awaitable[set[UUID]]]  # those of the requests that were erased


async def remove(
    find_erased: FindErased, broker: AbstractConnection, *, limits: Limits = DEFAULT_LIMITS
) -> int:
    """Remove the dead letters of all queues that mention an erased request. Returns their number.

    Raises QueueMissing, DeadLettersInUse and TooManyDeadLetters, after the other queue has been searched.
    """
    number = 0
    failures = []
    for queue in QUEUES.values():
        try:
            number += await _remove(find_erased, broker, queue, limits)
        except OperatorError as failure:
            failures.append(failure)
    if number:
        _log.info("dead_letters_erased", number=number)
    if failures:
        raise failures[0]
    return number


async def _remove(find_erased: FindErased, broker: AbstractConnection, queue: Queue, limits: Limits) -> int:
    mentioned: dict[int, set[UUID]] = {}

    def note(position: int, message: AbstractIncomingMessage) -> bool:
        mentioned[position] = _request_ids(message)
        return False  # The body is not needed any more.

    async with dead_letter_queues.held(
        broker, queue, limit=_LONGEST_QUEUE, wanted=note, limits=limits
    ) as held:
        gone = await find_erased(set().union(*mentioned.values()))
        doomed = [message for position, message in enumerate(held.messages, 1) if mentioned[position] & gone]
        for message in doomed:
            await message.ack()
        # Nothing answers an acknowledgement, but the broker reads what comes after it later.
        async with asyncio.timeout(limits.answer_seconds):
            await held.channel.declare_queue(queue.dead_letters, passive=True)
        if len(held.messages) < held.count:
            raise TooManyDeadLetters(f"{queue.dead_letters}: {TooManyDeadLetters.__doc__}")
    return len(doomed)


def _request_ids(message: AbstractIncomingMessage) -> set[UUID]:
    """Return the requests that a message mentions, however malformed it is.

    Its headers count too: in CloudEvents' binary mode the subject is one of them.
    """
    properties = f"{message.message_id} {message.correlation_id} {message.headers}"
    names = _UUID.findall(message.body) + _UUID.findall(properties.encode(errors="replace"))
    return {found for each in names if (found := parse_uuid(each.decode()))}
