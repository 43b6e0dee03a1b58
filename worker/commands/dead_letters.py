"""`dead-letters list|redrive`: the messages that consumers refused."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

import click
import msgspec
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aiormq.exceptions import DeliveryError

from service import command_line
from service.command_line import Answer, answering, on_record, printable, table
from service.identifiers import parse_uuid
from service.operations import operator_actions
from service.operations.operator_actions import Operator
from service.postgres import outages
from service.postgres.pool import Connection
from worker.commands import dead_letter_queues
from worker.consumers import incoming
from worker.consumers.incoming import safe_id
from worker.rabbitmq import topology
from worker.rabbitmq.copies import copy_of
from worker.rabbitmq.topology import Queue

QUEUES = {queue.name: queue for queue in topology.QUEUES}

# Headers that say how a message died. They are written anew if it dies again.
_OF_DEATH = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "x-reason")
_REDRIVEN = "x-redriven"
_IN_MEMORY = 20  # messages


class Death(msgspec.Struct, frozen=True):
    """An entry of the header x-death: why, from which queue and how often the broker moved the message."""

    queue: str
    reason: str
    count: int
    time: datetime | None


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter. Headers and body, which may contain personal data of other teams, only if asked for."""

    position: int  # 1 is the next to be redriven
    message_id: str | None
    type: str | None
    reason: str | None
    reason_text: str | None
    redriven: int
    deaths: list[Death]
    headers: dict[str, str] | None = None
    body: str | None = None


class Listing(msgspec.Struct, frozen=True):
    """Dead letters of a queue, and how many there are in all."""

    queue: str
    count: int
    letters: list[DeadLetter]


class Redriven(msgspec.Struct, frozen=True):
    """The messages moved back, those that were asked for and not found, and how many are left."""

    queue: str
    moved: list[str | None]
    not_found: list[str]
    left: int


_message_ids = click.option(
    "--message-id", "message_ids", multiple=True, metavar="ID", help="Only this one; repeatable."
)


@click.command("list")
@click.argument("names", nargs=-1, type=click.Choice(list(QUEUES)), metavar="[QUEUE]...")
@click.option("--limit", type=command_line.COUNT, default=20, show_default=True, help="The most of a queue.")
@_message_ids
@click.option("--position", type=command_line.COUNT, help="Only this one, as listed: it may have no id.")
@answering
async def list_letters(
    *, names: Sequence[str], limit: int, message_ids: Sequence[str], position: int | None
) -> Answer:
    """Count the dead letters of each queue and show the first. They stay where they are.

    Those that are named by --message-id or --position are shown with headers and body (personal data!).
    """

    def is_named(number: int, message: AbstractIncomingMessage) -> bool:
        return number == position or message.message_id in message_ids

    is_any_named = bool(message_ids) or position is not None
    async with dead_letter_queues.connected() as broker:
        listings = [
            await _list(broker, QUEUES[name], is_named, limit=None if is_any_named else limit)
            for name in names or QUEUES
        ]
    return Answer(listings, "\n\n".join(map(_as_text, listings)))


async def _list(
    broker: AbstractConnection, queue: Queue, is_named: dead_letter_queues.Wanted, *, limit: int | None
) -> Listing:
    """Return the first letters, or with *limit* None those that are named."""
    async with dead_letter_queues.opened(broker, queue) as dead:
        letters = [
            _opened(message, number) if is_named(number, message) else _describe(message, number)
            async for number, message in dead.read(is_named, limit=limit)
            if limit is not None or is_named(number, message)
        ]
    return Listing(queue.dead_letters, dead.count, letters)


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
    parts = [f"{listing.queue}: {listing.count} messages"]
    if rows:
        parts.append(table(headings, rows))
    for letter in listing.letters:
        if letter.headers is not None:
            parts.append("\n".join(f"{printable(n)}: {printable(v)}" for n, v in letter.headers.items()))
            parts.append(printable(letter.body or ""))
    return "\n\n".join(parts)


@click.command
@click.argument("name", type=click.Choice(list(QUEUES)), metavar="QUEUE")
@_message_ids
@answering
@on_record
async def redrive(*, name: str, message_ids: Sequence[str], by: Operator) -> Answer:
    """Move dead letters back to the end of their queue, in order. A crash may leave one in both queues.

    Each is recorded before it is moved, so a command that is cut off may leave a record of a message that was
    not moved. A message that names no request is moved without a record.
    """
    queue = QUEUES[name]
    moved: list[str | None] = []

    def is_wanted(_: int, message: AbstractIncomingMessage) -> bool:
        return not message_ids or message.message_id in message_ids

    async with (
        command_line.postgres() as connection,
        dead_letter_queues.connected() as broker,
        dead_letter_queues.opened(broker, queue) as dead,
    ):
        with command_line.progress("redriving", dead.count) as advance:
            # Those that are left where they are stay unacknowledged until the end.
            in_memory = 0 if message_ids else _IN_MEMORY
            async for number, message in dead.read(is_wanted, in_memory=in_memory):
                if is_wanted(number, message):
                    await _record(connection, message, by, len(moved))
                    await _move_back(dead.channel, queue, message, len(moved))
                    moved.append(message.message_id)
                advance(1)
    not_found = sorted(set(message_ids).difference(moved))
    redriven = Redriven(name, moved, not_found, dead.count - len(moved))
    lines = [f"{len(moved)} messages moved to {name}, {redriven.left} left"]
    lines += [f"{printable(message_id)}: not found" for message_id in not_found]
    return Answer(redriven, "\n".join(lines))


dead_letters = click.Group(
    "dead-letters",
    help="Show and redrive the messages that consumers refused.",
    commands=[list_letters, redrive],
)


async def _record(connection: Connection, message: AbstractIncomingMessage, by: Operator, moved: int) -> None:
    """Record that this message is moved, under the request that it names, if any."""
    uuid = incoming.read(message.body).uuid
    request_id = parse_uuid(uuid) if uuid else None
    if request_id is None:
        return
    changed = [(request_id, safe_id(message.message_id))]
    try:
        await operator_actions.record(connection, "dead-letters redrive", changed, by)
    except outages.OUTAGE_ERRORS:  # Some would pass for errors of the broker.
        raise click.ClickException(f"Postgres did not record the change. {_kept(moved)}") from None


async def _move_back(
    channel: AbstractChannel, queue: Queue, message: AbstractIncomingMessage, moved: int
) -> None:
    """Publish a message to its queue, then acknowledge it: a crash in between repeats it."""
    async with asyncio.timeout(dead_letter_queues.ANSWER_SECONDS):
        try:
            await channel.default_exchange.publish(_as_before(message), queue.name, mandatory=True)
        except DeliveryError:
            text = f"{queue.name}: the live queue is missing or full. {_kept(moved)}"
            raise click.ClickException(text) from None
        await message.ack()


def _kept(moved: int) -> str:
    return f"Moved: {moved}. The others are still dead letters."


def _as_before(message: AbstractIncomingMessage) -> Message:
    """Return the message as it was before it died, with one more redrive in its header."""
    headers = {name: value for name, value in message.headers.items() if not name.startswith(_OF_DEATH)}
    return copy_of(message, {**headers, _REDRIVEN: _redriven(message) + 1})


def _opened(message: AbstractIncomingMessage, position: int) -> DeadLetter:
    """Return a letter with headers and body."""
    return msgspec.structs.replace(
        _describe(message, position),
        headers={name: str(value) for name, value in message.headers.items()},
        body=message.body.decode(errors="backslashreplace"),
    )


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
