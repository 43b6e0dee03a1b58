"""`dead-letters list|redrive|discard`: the messages that consumers refused."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import click
import msgspec
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aiormq.exceptions import ChannelNotFoundEntity, DeliveryError

from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, on_record, printable, table
from service.settings import load
from worker.consumers import incoming
from worker.consumers.dead_lettering import SENDER, copy_of
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, open_connection
from worker.rabbitmq.topology import Queue
from worker.settings import AmqpUrl

QUEUES = {queue.name: queue for queue in topology.QUEUES}
ANSWER_SECONDS = 10.0  # for each reply from the broker
ARRIVAL_SECONDS = 2.0  # for the arrival of the next message
_PREFETCH = 10  # messages that are in memory while all are redriven
_MOST_SEARCHED = 10_000  # messages, which may all be in memory, if not all are chosen

# Headers that record how a message was dead-lettered. A redriven message does not have them.
_OF_DEATH = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "x-reason")

Settle = Callable[[AbstractChannel, Queue, AbstractIncomingMessage], Awaitable[None]]


class BrokerSettings(msgspec.Struct, frozen=True, rename="upper"):
    """The settings of commands that use RabbitMQ."""

    amqp_url: AmqpUrl


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter. Headers and body may contain personal data, and are included only if asked for."""

    message_id: str | None
    uuid: str | None  # of the request
    type: str | None
    sender: str | None  # the RabbitMQ user, if RabbitMQ has checked it
    reason: str | None
    reason_text: str | None
    headers: dict[str, str] | None = None
    body: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """Chooses the dead letters with one of these message ids, and one of these reasons, or all."""

    message_ids: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def has(self, letter: DeadLetter) -> bool:
        """Whether *letter* is chosen."""
        return all(
            value in chosen
            for value, chosen in ((letter.message_id, self.message_ids), (letter.reason, self.reasons))
            if chosen
        )


class QueueListing(msgspec.Struct, frozen=True):
    """The number of dead letters in a queue, and some of them."""

    queue: str
    count: int
    letters: list[DeadLetter]


@click.command("list")
@click.argument("names", nargs=-1, type=click.Choice(list(QUEUES)), metavar="[QUEUE]...")
@click.option("--limit", type=parameters.COUNT, default=20, show_default=True, help="The most per queue.")
@click.option("--full", is_flag=True, help="Show headers and body, too (personal data!).")
@answering
async def list_letters(*, names: Sequence[str], limit: int, full: bool) -> Answer:
    """Count the dead letters of each queue and show the first ones. Nothing is removed."""
    listings = []
    for queue in (QUEUES[name] for name in names or QUEUES):
        async with _opened(queue) as (channel, count):
            read = _read(channel, queue, min(limit, count), prefetch=limit)
            letters = [_describe(message, in_full=full) async for message in read]
        listings.append(QueueListing(queue.dead_letters, count, letters))
    return Answer(listings, "\n\n".join(map(_as_text, listings)))


def _describe(message: AbstractIncomingMessage, *, in_full: bool = False) -> DeadLetter:
    headers = {name: str(value) for name, value in message.headers.items()}
    died_by_itself = headers.get("x-first-death-reason")  # Its x-user-id may be the sender's own.
    return DeadLetter(
        message.message_id,
        incoming.read(message.body).uuid,
        message.type,
        message.user_id or (None if died_by_itself else headers.get(SENDER)),
        headers.get("x-reason", died_by_itself),  # set by a consumer, or by RabbitMQ
        headers.get("x-reason-text"),
        headers if in_full else None,
        message.body.decode(errors="backslashreplace") if in_full else None,
    )


def _as_text(listing: QueueListing) -> str:
    headings = DeadLetter.__struct_fields__[:6]
    rows = [msgspec.structs.astuple(letter)[: len(headings)] for letter in listing.letters]
    parts = [f"{listing.queue}: {listing.count} messages"]
    if rows:
        parts.append(table(headings, rows))
    for letter in listing.letters:
        if letter.headers is not None:
            parts.append("\n".join(f"{printable(n)}: {printable(v)}" for n, v in letter.headers.items()))
            parts.append(printable(letter.body or ""))
    return "\n\n".join(parts)


def _choosing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments that choose dead letters. The command gets *queue* and *choice*."""

    @click.argument("name", type=click.Choice(list(QUEUES)), metavar="QUEUE")
    @click.option("--message-id", "message_ids", multiple=True, metavar="ID", help="Those with this id.")
    @click.option("--reason", "reasons", multiple=True, help="Those with this reason.")
    @functools.wraps(function)
    def callback(*, name: str, **arguments: Any) -> Any:  # noqa: ANN401 - click's
        choice = Choice(**{field: arguments.pop(field) for field in Choice.__struct_fields__})
        return function(queue=QUEUES[name], choice=choice, **arguments)

    return callback


@click.command
@answering
@on_record
@_choosing
async def redrive(*, queue: Queue, choice: Choice, by: Operator) -> Answer:
    """Move dead letters back to the end of their queue. A crash may leave a message in both queues.

    A message that its consumer refuses again becomes a dead letter again.
    """
    return await _settle(queue, choice, _move_back, by, action="redrive")


@click.command
@answering
@on_record
@_choosing
async def discard(*, queue: Queue, choice: Choice, by: Operator) -> Answer:
    """Remove dead letters, which cannot be undone. Needs --message-id or --reason."""
    if choice == Choice():
        raise click.UsageError("say which dead letters: --message-id or --reason")
    return await _settle(queue, choice, _discard, by, action="discard")


dead_letters = click.Group(
    "dead-letters",
    help="Show, redrive and discard the messages that consumers refused.",
    commands=[list_letters, redrive, discard],
)


async def _settle(queue: Queue, choice: Choice, settle: Settle, by: Operator, *, action: str) -> Answer:
    """Settle the chosen dead letters one by one. The others go back to their queue when this ends.

    Returns how many were settled. The status is 1 if there was none, or none with one of the ids.
    """
    ids: list[str | None] = []
    done = "moved" if action == "redrive" else "discarded"
    async with _opened(queue) as (channel, count):
        is_all = choice == Choice()
        number = count if is_all else min(count, _MOST_SEARCHED)
        async for message in _read(channel, queue, number, prefetch=_PREFETCH if is_all else number):
            if choice.has(_describe(message)):
                if not ids:
                    await _record(queue, choice, f"dead-letters {action}", by)
                async with asyncio.timeout(ANSWER_SECONDS):
                    await settle(channel, queue, message)
                ids.append(message.message_id)
    missing = [each for each in choice.message_ids if each not in ids]
    said = [f"{len(ids)} messages {done}"]
    said += [f"no dead letter has the id {each}" for each in missing]
    said += [f"only the first {number} of {count} were searched"] if number < count else []
    said += [] if ids else [f"`python -m worker dead-letters list {queue.name}` shows which there are"]
    data = {"queue": queue.name, done: len(ids), "missing": missing}
    return Answer(data, printable("; ".join(said)), status=int(not ids or bool(missing)))


async def _record(queue: Queue, choice: Choice, action: str, by: Operator) -> None:
    chosen = ", ".join((*choice.message_ids, *choice.reasons)) or "all"
    async with connecting.postgres() as connection:
        await operator_actions.record(connection, action, [(None, f"{queue.name}: {chosen}")], by)


async def _move_back(channel: AbstractChannel, queue: Queue, message: AbstractIncomingMessage) -> None:
    """Publish a message to its queue without dead-letter headers. Then acknowledge the dead letter."""
    headers = {name: value for name, value in message.headers.items() if not name.startswith(_OF_DEATH)}
    try:
        await channel.default_exchange.publish(copy_of(message, headers), queue.name, mandatory=True)
    except DeliveryError:
        text = f"{queue.name}: the live queue is missing or full. The rest was not moved."
        raise click.ClickException(text) from None
    await message.ack()


async def _discard(_channel: AbstractChannel, _queue: Queue, message: AbstractIncomingMessage) -> None:
    await message.ack()


@asynccontextmanager
async def _opened(queue: Queue) -> AsyncIterator[tuple[AbstractChannel, int]]:
    """Open a channel, and count the dead letters of a queue. Raises InvalidSetting or BrokerUnavailable.

    Nothing is declared. RabbitMQ returns unacknowledged messages to the queue when the connection is closed.
    """
    url = load(BrokerSettings).amqp_url
    try:
        async with open_connection(url, name="operator", seconds=ANSWER_SECONDS) as connection:
            async with asyncio.timeout(ANSWER_SECONDS):
                channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
                dead = await channel.declare_queue(queue.dead_letters, passive=True)
            yield channel, dead.declaration_result.message_count or 0
    except ChannelNotFoundEntity:
        message = f"{queue.dead_letters}: no such queue. A worker declares it when it starts."
        raise click.ClickException(message) from None
    except BROKER_ERRORS as error:
        raise BrokerUnavailable from error


async def _read(
    channel: AbstractChannel, queue: Queue, number: int, *, prefetch: int
) -> AsyncIterator[AbstractIncomingMessage]:
    """Yield the first *number* dead letters. Raises ClickException if fewer arrive."""
    arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    async with asyncio.timeout(ANSWER_SECONDS):
        await channel.set_qos(prefetch_count=prefetch)
        await (await channel.get_queue(queue.dead_letters, ensure=False)).consume(arrived.put)
    for left in range(number, 0, -1):
        try:
            yield await asyncio.wait_for(arrived.get(), ARRIVAL_SECONDS)
        except TimeoutError:  # A message held by another consumer never arrives.
            missing = f"{left} of {number} messages did not arrive"
            raise click.ClickException(f"{queue.dead_letters}: {missing}. Run it again.") from None
