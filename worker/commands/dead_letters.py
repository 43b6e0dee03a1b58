"""`dead-letters list|redrive`: the messages that consumers refused."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import click
import msgspec
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aiormq.exceptions import ChannelNotFoundEntity, DeliveryError

from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, on_record, printable, table
from service.settings import load
from worker.consumers.dead_lettering import copy_of
from worker.rabbitmq import topology
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, open_connection
from worker.rabbitmq.topology import Queue
from worker.settings import AmqpUrl

QUEUES = {queue.name: queue for queue in topology.QUEUES}
ANSWER_SECONDS = 10.0  # for each reply from the broker
ARRIVAL_SECONDS = 2.0  # for the arrival of the next message
_PREFETCH = 10  # messages of a redrive that are in memory

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
@answering
@on_record
async def redrive(*, name: str, by: Operator) -> Answer:
    """Move all dead letters back to the end of their queue. A crash may leave a message in both queues.

    A message that its consumer refuses again becomes a dead letter again.
    """
    queue = QUEUES[name]
    async with _opened(queue) as (channel, count):
        async with connecting.postgres() as postgres:
            subject = f"{count} messages to {name}"
            await operator_actions.record(postgres, "dead-letters redrive", [(None, subject)], by)
        async for message in _read(channel, queue, count, prefetch=_PREFETCH):
            await _move_back(channel, queue, message)
    return Answer({"queue": name, "moved": count}, f"{count} messages moved to {name}")


dead_letters = click.Group(
    "dead-letters",
    help="Show and redrive the messages that consumers refused.",
    commands=[list_letters, redrive],
)


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
