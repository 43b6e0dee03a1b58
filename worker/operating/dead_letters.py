"""`dead-letters list|show|redrive`: the messages that consumers refused."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aiormq.exceptions import DeliveryError

from service.identifiers import parse_uuid
from service.operations import operator_actions, operator_arguments
from service.operations.operator_actions import Operator
from service.postgres import outages
from service.postgres.pool import Connection
from worker.consumers import incoming
from worker.consumers.incoming import safe_id
from worker.operating import arguments, connections, dead_letter_queues
from worker.operating.answers import Answer, OperatorError, printable, table
from worker.operating.arguments import InvalidArgument, Subcommands, add_command, add_group
from worker.operating.dead_letter_queues import DEFAULT_LIMITS, QUEUES, Limits, queue_named
from worker.rabbitmq.copies import copy_of
from worker.rabbitmq.topology import Queue

# Headers that say how a message died. They are written anew if it dies again.
_OF_DEATH = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "x-reason")
_REDRIVEN = "x-redriven"
_RECORDED_AT_ONCE = 100  # messages


class LetterNotFound(OperatorError):
    """There is no such message among those read."""


class LiveQueueRefuses(OperatorError):
    """The live queue is missing or full. The messages not moved are still dead letters."""


class NotRecorded(OperatorError):
    """Postgres did not record the change. The messages not moved are still dead letters."""


class Death(msgspec.Struct, frozen=True):
    """An entry of the header x-death: why, from which queue and how often the broker moved the message."""

    queue: str
    reason: str
    count: int
    time: datetime | None


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter without its body, which may contain personal data of other teams."""

    position: int  # 1 is the next to be redriven
    message_id: str | None
    type: str | None
    reason: str | None
    reason_text: str | None
    redriven: int
    deaths: list[Death]


class Opened(msgspec.Struct, frozen=True):
    """A dead letter with its headers and body."""

    letter: DeadLetter
    headers: dict[str, str]
    body: str


class Listing(msgspec.Struct, frozen=True):
    """The first dead letters of a queue, and how many there are in all."""

    queue: str
    count: int
    letters: list[DeadLetter]


class Redriven(msgspec.Struct, frozen=True):
    """The messages moved back, those that were asked for and not found, and how many are left."""

    queue: str
    moved: list[str | None]
    not_found: list[str]
    left: int


def add_to(commands: Subcommands) -> None:
    """Add the commands to the parser."""
    names = ", ".join(QUEUES)
    group = add_group(commands, "dead-letters", "Show and redrive the messages that consumers refused.")
    listing = add_command(group, "list", list_letters)
    listing.add_argument("queues", nargs="*", metavar="QUEUE", help=f"of {names} (default: all)")
    listing.add_argument("--limit", type=arguments.count, default=20, help="per queue (default: 20)")
    showing = add_command(group, "show", show)
    showing.add_argument("queue", help=names)
    showing.add_argument("message_id", nargs="?")
    showing.add_argument("--position", type=arguments.count, help="as listed, for a message without an id")
    redriving = add_command(group, "redrive", redrive)
    redriving.add_argument("queue", help=names)
    redriving.add_argument(
        "--message-id", dest="message_ids", action="append", metavar="ID", help="repeatable (default: all)"
    )
    for command in (listing, showing, redriving):
        command.set_defaults(limits=DEFAULT_LIMITS)
    operator_arguments.add_arguments(redriving)
    for command in (showing, redriving):
        command.add_argument(
            "--limit", type=arguments.count, default=1000, help="messages to read (default: 1000)"
        )


async def list_letters(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Count the dead letters of each queue and show the first. They stay where they are."""
    queues = [queue_named(name) for name in options.queues or QUEUES]
    async with connections.rabbitmq(environment) as broker:
        listings = [await _list(broker, queue, options) for queue in queues]
    return Answer(listings, "\n\n".join(map(_as_text, listings)))


async def _list(broker: AbstractConnection, queue: Queue, options: argparse.Namespace) -> Listing:
    async with dead_letter_queues.held(
        broker, queue, limit=options.limit, wanted=lambda *_: False, limits=options.limits
    ) as held:
        letters = [_describe(message, position) for position, message in enumerate(held.messages, 1)]
    return Listing(queue.dead_letters, held.count, letters)


def _as_text(listing: Listing) -> str:
    headings = ("no.", "message id", "type", "reason", "redriven", "died in", "deaths", "last at")
    rows = [
        (
            letter.position,
            letter.message_id,
            letter.type,
            letter.reason,
            letter.redriven,
            letter.deaths[0].queue if letter.deaths else None,
            sum(death.count for death in letter.deaths),
            letter.deaths[0].time if letter.deaths else None,
        )
        for letter in listing.letters
    ]
    total = f"{listing.queue}: {listing.count} messages"
    return f"{total}\n\n{table(headings, rows)}" if rows else total


async def show(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Show a dead letter with headers and body, which may contain personal data. It stays where it is."""
    queue = queue_named(options.queue)
    message_id: str | None = options.message_id
    if (message_id is None) == (options.position is None):
        raise InvalidArgument("name the message, by its id or with --position")

    def is_it(position: int, message: AbstractIncomingMessage) -> bool:
        return position == options.position if message_id is None else message.message_id == message_id

    async with (
        connections.rabbitmq(environment) as broker,
        dead_letter_queues.held(
            broker, queue, limit=options.limit, wanted=is_it, limits=options.limits
        ) as held,
    ):
        for position, message in enumerate(held.messages, 1):
            if is_it(position, message):
                return _opened(message, position)
    raise LetterNotFound(f"no such message among the first {len(held.messages)} of {queue.dead_letters}")


def _opened(message: AbstractIncomingMessage, position: int) -> Answer:
    letter = _describe(message, position)
    headers = {name: str(value) for name, value in message.headers.items()}
    body = message.body.decode(errors="backslashreplace")
    facts = {"message id": letter.message_id, "type": letter.type, "reason": letter.reason, **headers}
    text = "\n".join(f"{printable(name)}: {printable(str(value))}" for name, value in facts.items())
    return Answer(Opened(letter, headers, body), f"{text}\n\n{printable(body)}")


async def redrive(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Move dead letters back to the end of their queue, in order. A crash may leave one in both queues.

    Each is recorded before it is moved, so a command that is cut off may leave records of messages that were
    not moved. A message that names no request is moved without a record.
    """
    queue = queue_named(options.queue)
    by = operator_arguments.operator(options)
    wanted: list[str] = options.message_ids or []
    moved: list[str | None] = []

    def is_wanted(_: int, message: AbstractIncomingMessage) -> bool:
        return not wanted or message.message_id in wanted

    async with (
        connections.postgres(environment) as connection,
        connections.rabbitmq(environment) as broker,
        dead_letter_queues.held(
            broker, queue, limit=options.limit, wanted=is_wanted, limits=options.limits
        ) as held,
    ):
        chosen = [
            message for position, message in enumerate(held.messages, 1) if is_wanted(position, message)
        ]
        for start in range(0, len(chosen), _RECORDED_AT_ONCE):
            batch = chosen[start : start + _RECORDED_AT_ONCE]
            await _record(connection, batch, by, len(moved))
            for message in batch:
                await _move_back(held.channel, queue, message, len(moved), options.limits)
                moved.append(message.message_id)
    redriven = Redriven(queue.name, moved, sorted(set(wanted).difference(moved)), held.count - len(moved))
    lines = [f"{len(moved)} messages moved to {queue.name}, {redriven.left} left"]
    lines += [f"{printable(message_id)}: not found" for message_id in redriven.not_found]
    return Answer(redriven, "\n".join(lines))


async def _record(
    connection: Connection, messages: Sequence[AbstractIncomingMessage], by: Operator, moved: int
) -> None:
    """Record that these messages are moved, under the requests that they name. Raises NotRecorded."""
    changed = [
        (request_id, safe_id(message.message_id))
        for message in messages
        if (uuid := incoming.read(message.body).uuid) and (request_id := parse_uuid(uuid))
    ]
    try:
        await operator_actions.record(connection, "dead-letters redrive", changed, by)
    except outages.OUTAGE_ERRORS:  # Some would pass for errors of the broker.
        raise NotRecorded(f"{NotRecorded.__doc__} Moved: {moved}.") from None


async def _move_back(
    channel: AbstractChannel, queue: Queue, message: AbstractIncomingMessage, moved: int, limits: Limits
) -> None:
    """Publish a message to its queue, then acknowledge it: a crash in between repeats it and never loses it.

    Raises LiveQueueRefuses.
    """
    async with asyncio.timeout(limits.answer_seconds):
        try:
            await channel.default_exchange.publish(_as_before(message), queue.name, mandatory=True)
        except DeliveryError:
            raise LiveQueueRefuses(f"{queue.name}: {LiveQueueRefuses.__doc__} Moved: {moved}.") from None
        await message.ack()


def _as_before(message: AbstractIncomingMessage) -> Message:
    """Return the message as it was before it died, with one more redrive in its header."""
    headers = {name: value for name, value in message.headers.items() if not name.startswith(_OF_DEATH)}
    return copy_of(message, {**headers, _REDRIVEN: _redriven(message) + 1})


def _describe(message: AbstractIncomingMessage, position: int) -> DeadLetter:
    deaths = _deaths(message)
    reason = message.headers.get("x-reason")
    text = message.headers.get("x-reason-text")
    return DeadLetter(
        position=position,
        message_id=message.message_id,
        type=message.type,
        reason=str(reason) if reason is not None else next((death.reason for death in deaths), None),
        reason_text=str(text) if text else None,
        redriven=_redriven(message),
        deaths=deaths,
    )


def _deaths(message: AbstractIncomingMessage) -> list[Death]:
    """Return the entries of the header x-death. A sender may have written anything there."""
    entries = message.headers.get("x-death")
    return (
        [_death(entry) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )


def _death(entry: Mapping[str, object]) -> Death:
    count, time = entry.get("count"), entry.get("time")
    return Death(
        queue=str(entry.get("queue")),
        reason=str(entry.get("reason")),
        count=count if isinstance(count, int) else 0,
        time=time if isinstance(time, datetime) else None,
    )


def _redriven(message: AbstractIncomingMessage) -> int:
    times = message.headers.get(_REDRIVEN)
    return times if isinstance(times, int) else 0
