"""`dead-letters list|redrive|discard`: the messages that consumers refused."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import click
import msgspec
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aiormq.exceptions import ChannelNotFoundEntity, DeliveryError

from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, on_record, printable
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


class BrokerSettings(msgspec.Struct, frozen=True, rename="upper"):
    """The settings of commands that use RabbitMQ."""

    amqp_url: AmqpUrl


dead_letters = click.Group("dead-letters", help="Show, redrive or discard messages that consumers refused.")


@dead_letters.command("list")
@click.argument("names", nargs=-1, type=click.Choice(list(QUEUES)), metavar="[QUEUE]...")
@click.option("--limit", type=parameters.COUNT, default=20, show_default=True, help="The most per queue.")
@click.option("--full", is_flag=True, help="Show headers and body, too (personal data!).")
@answering
async def list_letters(*, names: Sequence[str], limit: int, full: bool) -> Answer:
    """Count the dead letters of each queue and show the first ones. Nothing is removed."""
    answers = [await _list(QUEUES[name], limit=limit, full=full) for name in names or QUEUES]
    return Answer([each.data for each in answers], "\n\n".join(each.text for each in answers))


async def _list(queue: Queue, *, limit: int, full: bool) -> Answer:
    async with _opened(queue) as (channel, count):
        read = [each async for each in _read(channel, queue, min(limit, count), prefetch=limit)]
    letters = [_describe(message) for message in read]
    parts = [f"{queue.dead_letters}: {count} messages"]
    if letters:
        parts.append(Answer.listing(letters).text)
    if full:
        for letter, message in zip(letters, read, strict=True):
            letter["headers"] = {name: str(value) for name, value in message.headers.items()}
            letter["body"] = message.body.decode(errors="backslashreplace")
            parts.append("\n".join(printable(f"{n}: {v}") for n, v in letter["headers"].items()))
            parts.append(printable(letter["body"]))
    return Answer({"queue": queue.dead_letters, "count": count, "letters": letters}, "\n\n".join(parts))


def _describe(message: AbstractIncomingMessage) -> dict[str, Any]:
    """Return what identifies a dead letter, without headers and body, which may contain personal data."""
    headers = {name: str(value) for name, value in message.headers.items()}
    died_by_itself = headers.get("x-first-death-reason")  # Its x-user-id may be the sender's own.
    return {
        "message_id": message.message_id,
        "uuid": incoming.read(message.body).uuid,  # of the request
        "type": message.type,
        "sender": message.user_id or (None if died_by_itself else headers.get(SENDER)),
        "reason": headers.get("x-reason", died_by_itself),  # set by a consumer, or by RabbitMQ
        "reason_text": headers.get("x-reason-text"),
    }


_queue = click.argument("name", type=click.Choice(list(QUEUES)), metavar="QUEUE")
_ids = click.option("--message-id", "ids", multiple=True, metavar="ID", help="Those with this id.")
_reasons = click.option("--reason", "reasons", multiple=True, help="Those with this reason.")


@dead_letters.command()
@_queue
@_ids
@_reasons
@on_record
async def redrive(*, name: str, ids: Sequence[str], reasons: Sequence[str], by: Operator) -> Answer:
    """Move dead letters back to the end of their queue. A crash may leave a message in both queues.

    A message that its consumer refuses again becomes a dead letter again.
    """
    return await _settle(QUEUES[name], ids, reasons, by, is_redrive=True)


@dead_letters.command()
@_queue
@_ids
@_reasons
@on_record
async def discard(*, name: str, ids: Sequence[str], reasons: Sequence[str], by: Operator) -> Answer:
    """Remove dead letters, which cannot be undone. Needs --message-id or --reason."""
    if not (ids or reasons):
        raise click.UsageError("say which dead letters: --message-id or --reason")
    return await _settle(QUEUES[name], ids, reasons, by, is_redrive=False)


async def _settle(
    queue: Queue, ids: Sequence[str], reasons: Sequence[str], by: Operator, *, is_redrive: bool
) -> Answer:
    """Redrive or discard the dead letters with one of *ids* and one of *reasons*. Without either, all.

    The others are held until the connection closes, when RabbitMQ returns them to their queue.
    """
    settled: list[tuple[str | None, str | None]] = []
    async with _opened(queue) as (channel, count):
        async with connecting.postgres() as postgres:
            action = f"dead-letters {'redrive' if is_redrive else 'discard'}"
            # Printable, because Postgres refuses the surrogates of words that are not UTF-8.
            subject = printable(f"{queue.name}: {', '.join((*ids, *reasons)) or f'all {count}'}")
            await operator_actions.record(postgres, action, [(None, subject)], by)
        is_chosen = bool(ids or reasons)
        searched = min(count, _MOST_SEARCHED) if is_chosen else count
        prefetch = searched + 1 if is_chosen else _PREFETCH
        async for message in _read(channel, queue, searched, prefetch=prefetch):
            letter = _describe(message)
            if (not ids or letter["message_id"] in ids) and (not reasons or letter["reason"] in reasons):
                async with asyncio.timeout(ANSWER_SECONDS):
                    if is_redrive:
                        await _move_back(channel, queue, message)
                    await message.ack()
                settled.append((letter["message_id"], letter["reason"]))
    missing = [each for each in (*ids, *reasons) if not any(each in values for values in settled)]
    text = f"{len(settled)} of {count} messages {'moved' if is_redrive else 'discarded'}"
    text += f"; none that meets all conditions has {', '.join(missing)}" if missing else ""
    text += f"; only the first {searched} were searched" if searched < count else ""
    data = {"queue": queue.name, "messages": len(settled), "missing": missing}
    return Answer(data, printable(text), status=int(not settled or bool(missing)))


async def _move_back(channel: AbstractChannel, queue: Queue, message: AbstractIncomingMessage) -> None:
    """Publish a message to its queue without dead-letter headers. The queue confirms it."""
    headers = {name: value for name, value in message.headers.items() if not name.startswith(_OF_DEATH)}
    try:
        await channel.default_exchange.publish(copy_of(message, headers), queue.name, mandatory=True)
    except DeliveryError:
        text = f"{queue.name}: the live queue is missing or full. The rest was not moved."
        raise click.ClickException(text) from None


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
    """Yield the first *number* dead letters. Raises ClickException if fewer arrive.

    They are consumed, because basic.get makes a consumer of each unacknowledged message. RabbitMQ returns the
    messages of more than 32 consumers in another order when it starts again and replays the queue's log, and
    the acknowledgements that follow there then delete other messages.
    """
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
