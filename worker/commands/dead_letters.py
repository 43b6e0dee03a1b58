"""`dead-letters list|redrive`: the messages that consumers refused."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import click
import msgspec
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue
from aiormq.exceptions import ChannelNotFoundEntity, DeliveryError

from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, answering, on_record, printable, table
from service.command_line.operator_actions import Operator
from service.identifiers import parse_uuid
from service.postgres import outages
from service.postgres.pool import Connection
from service.settings import load
from worker.consumers import incoming
from worker.consumers.dead_lettering import copy_of
from worker.consumers.incoming import safe_id
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, open_connection
from worker.rabbitmq.message_properties import UNDECODABLE
from worker.rabbitmq.topology import Queue
from worker.settings import AmqpUrl

QUEUES = {queue.name: queue for queue in topology.QUEUES}
ANSWER_SECONDS = 10.0  # for each reply from the broker
ARRIVAL_SECONDS = 2.0  # for the arrival of the next message
_MOST = 10_000  # messages that a command reads, and may have in memory at a time

# Headers that record how a message was dead-lettered. A redriven message does not have them.
_OF_DEATH = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "x-reason")


class BrokerSettings(msgspec.Struct, frozen=True, rename="upper"):
    """The settings of commands that use RabbitMQ."""

    amqp_url: AmqpUrl


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter. Headers and body may contain personal data, and are included only if asked for."""

    message_id: str | None
    type: str | None
    reason: str | None
    reason_text: str | None
    headers: dict[str, str] | None = None
    body: str | None = None


class QueueListing(msgspec.Struct, frozen=True):
    """The number of dead letters in a queue, and some of them."""

    queue: str
    count: int
    letters: list[DeadLetter]


class Redriven(msgspec.Struct, frozen=True):
    """How many messages were moved back, and how many are left."""

    queue: str
    moved: int
    left: int
    undecodable: int  # how many of those read have undecodable properties


_ID_HELP = "Only messages with this id, or with '' only those without an id."


@click.command("list")
@click.argument("names", nargs=-1, type=click.Choice(list(QUEUES)), metavar="[QUEUE]...")
@click.option("--limit", type=parameters.COUNT, default=20, show_default=True, help="The most per queue.")
@click.option("--message-id", metavar="ID", help=_ID_HELP)
@answering
async def list_letters(*, names: Sequence[str], limit: int, message_id: str | None) -> Answer:
    """Count the dead letters of each queue and show the first ones. Nothing is removed.

    Messages named by --message-id are shown with headers and body (personal data!).
    """
    in_full = message_id is not None
    listings = []
    for queue in (QUEUES[name] for name in names or QUEUES):
        async with _opened(queue) as (connection, count):
            letters = [
                _describe(message, in_full=in_full)
                async for message in _read(connection, queue, count if in_full else min(limit, count))
                if message_id in {None, message.message_id or ""}
            ]
        listings.append(QueueListing(queue.dead_letters, count, letters))
    return Answer(listings, "\n\n".join(map(_as_text, listings)))


def _describe(message: AbstractIncomingMessage, *, in_full: bool) -> DeadLetter:
    headers = {name: str(value) for name, value in message.headers.items()}
    return DeadLetter(
        message.message_id,
        message.type,
        headers.get("x-reason", headers.get("x-first-death-reason")),  # set by a consumer, or by RabbitMQ
        headers.get("x-reason-text"),
        headers if in_full else None,
        message.body.decode(errors="backslashreplace") if in_full else None,
    )


def _as_text(listing: QueueListing) -> str:
    headings = ("message id", "type", "reason", "what is wrong")
    rows = [msgspec.structs.astuple(letter)[: len(headings)] for letter in listing.letters]
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
@click.option("--message-id", "message_ids", multiple=True, metavar="ID", help=f"{_ID_HELP} Repeatable.")
@answering
@on_record
async def redrive(*, name: str, message_ids: Sequence[str], by: Operator) -> Answer:
    """Move dead letters back to the end of their queue. A crash may leave messages in both queues.

    Messages with undecodable properties stay, because their consumer would refuse them again.

    A move is recorded before it is made. So an interrupted command may record a move that was not made. A
    message that names no request is moved without a record.
    """
    queue = QUEUES[name]
    moved = undecodable = 0
    async with (
        connecting.postgres() as postgres,
        _opened(queue) as (connection, count),
        _opened(queue) as (publishing, _),  # Here confirms need not wait behind thousands of dead letters.
    ):
        channel = await publishing.channel(publisher_confirms=True, on_return_raises=True)
        async for message in _read(connection, queue, count):
            if UNDECODABLE in message.headers:
                undecodable += 1
            elif not message_ids or (message.message_id or "") in message_ids:
                await _record(postgres, message, by)
                await _move_back(channel, queue, message)
                moved += 1
    redriven = Redriven(name, moved, count - moved, undecodable)
    text = f"{moved} messages moved to {name}, {redriven.left} left, {undecodable} of them undecodable"
    return Answer(redriven, text)


dead_letters = click.Group(
    "dead-letters",
    help="Show and redrive the messages that consumers refused.",
    commands=[list_letters, redrive],
)


async def _record(connection: Connection, message: AbstractIncomingMessage, by: Operator) -> None:
    """Record that this message is moved, if it names a request."""
    uuid = incoming.read(message.body).uuid
    request_id = parse_uuid(uuid) if uuid else None
    if request_id is None:
        return
    changed = [(request_id, safe_id(message.message_id))]
    try:
        await operator_actions.record(connection, "dead-letters redrive", changed, by)
    except outages.OUTAGE_ERRORS:  # `_opened` would report some of these as broker errors.
        raise click.ClickException("Postgres did not record the change. The rest was not moved.") from None


async def _move_back(channel: AbstractChannel, queue: Queue, message: AbstractIncomingMessage) -> None:
    """Publish a message to its queue without dead-letter headers. Then acknowledge the dead letter."""
    headers = {name: value for name, value in message.headers.items() if not name.startswith(_OF_DEATH)}
    async with asyncio.timeout(ANSWER_SECONDS):
        try:
            await channel.default_exchange.publish(copy_of(message, headers), queue.name, mandatory=True)
        except DeliveryError:
            text = f"{queue.name}: the live queue is missing or full. The rest was not moved."
            raise click.ClickException(text) from None
        await message.ack()


@asynccontextmanager
async def _opened(queue: Queue) -> AsyncIterator[tuple[AbstractConnection, int]]:
    """Connect, and count the dead letters of a queue. Raises InvalidSetting or BrokerUnavailable.

    Nothing is declared. Closing the connection returns unacknowledged messages to the queue in their order,
    even on RabbitMQ 3.10, the oldest supported release. A reject would change the order.
    """
    url = load(BrokerSettings).amqp_url
    try:
        async with open_connection(url, name="operator", seconds=ANSWER_SECONDS) as connection:
            async with asyncio.timeout(ANSWER_SECONDS), connection.channel() as channel:
                dead = await channel.declare_queue(queue.dead_letters, passive=True)
            yield connection, _count(dead)
    except ChannelNotFoundEntity:
        message = f"{queue.dead_letters}: no such queue. A worker declares it when it starts."
        raise click.ClickException(message) from None
    except BROKER_ERRORS as error:
        raise BrokerUnavailable from error


def _count(dead: AbstractQueue) -> int:
    return dead.declaration_result.message_count or 0


async def _read(
    connection: AbstractConnection, queue: Queue, number: int
) -> AsyncIterator[AbstractIncomingMessage]:
    """Yield the first *number* dead letters, at most _MOST. Raises ClickException if fewer arrive.

    One consumer gets the whole queue, because RabbitMQ returns what the caller does not acknowledge behind
    what it has returned before. With `basic.get`, each message would have a consumer of its own.
    """
    number = min(number, _MOST)
    arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    async with asyncio.timeout(ANSWER_SECONDS):
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=_MOST)
        await (await channel.get_queue(queue.dead_letters, ensure=False)).consume(arrived.put)
    for left in range(number, 0, -1):
        try:
            yield await asyncio.wait_for(arrived.get(), ARRIVAL_SECONDS)
        except TimeoutError:  # A message held by another consumer never arrives.
            missing = f"{left} of {number} messages did not arrive"
            raise click.ClickException(f"{queue.dead_letters}: {missing}. Run it again.") from None
