"""Removes the dead letters that mention erased requests."""

import re
from uuid import UUID

import structlog
from aio_pika.abc import AbstractConnection, AbstractIncomingMessage

from service.calculation_requests import erased
from service.identifiers import parse_uuid
from service.postgres.pool import Connection
from worker.operating import dead_letter_queues
from worker.operating.answers import OperatorError
from worker.operating.dead_letter_queues import DEFAULT_LIMITS, QUEUES, Limits
from worker.rabbitmq.topology import Queue

_LONGEST_QUEUE = 65_535  # the largest prefetch count
_UUID = re.compile(rb"req_[0-9A-Za-z]{22}")

_log = structlog.get_logger()


class TooManyDeadLetters(OperatorError):
    """Not all dead letters could be searched: there are too many. Redrive some, then run this again."""


async def remove(
    connection: Connection, broker: AbstractConnection, *, limits: Limits = DEFAULT_LIMITS
) -> int:
    """Remove the dead letters of all queues that mention an erased request. Returns their number.

    Raises QueueMissing, DeadLettersInUse and TooManyDeadLetters.
    """
    removed = [await _remove(connection, broker, queue, limits) for queue in QUEUES.values()]
    if number := sum(removed):
        _log.info("dead_letters_erased", number=number)
    return sum(removed)


async def _remove(connection: Connection, broker: AbstractConnection, queue: Queue, limits: Limits) -> int:
    mentioned: dict[int, set[UUID]] = {}

    def note(position: int, message: AbstractIncomingMessage) -> bool:
        mentioned[position] = _request_ids(message.body)
        return False  # The body is not needed any more.

    async with dead_letter_queues.held(
        broker, queue, limit=_LONGEST_QUEUE, wanted=note, limits=limits
    ) as held:
        gone = await erased.among(connection, set().union(*mentioned.values()))
        doomed = [message for position, message in enumerate(held.messages, 1) if mentioned[position] & gone]
        for message in doomed:
            await message.ack()
        if len(held.messages) < held.count:
            raise TooManyDeadLetters(f"{queue.dead_letters}: {TooManyDeadLetters.__doc__}")
    return len(doomed)


def _request_ids(body: bytes) -> set[UUID]:
    """Return the requests that a message mentions, however malformed it is."""
    return {found for each in _UUID.findall(body) if (found := parse_uuid(each.decode()))}
