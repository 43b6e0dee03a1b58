"""The commands on the dead letters: what lies there, one of them opened, and back to the queue."""

import argparse

from aio_pika.abc import AbstractConnection

from worker.operating import dead_letter_queues
from worker.operating.arguments import InvalidArgument
from worker.operating.dead_letter_queues import Listing
from worker.operating.tables import Answer, printable, table


async def list_letters(broker: AbstractConnection, arguments: argparse.Namespace) -> Answer:
    """Show how many dead letters each queue has, and the first of them; they stay where they are."""
    queues = [dead_letter_queues.queue_named(name) for name in arguments.queues or dead_letter_queues.QUEUES]
    listings = [
        await dead_letter_queues.list_letters(broker, queue, limit=arguments.limit) for queue in queues
    ]
    return Answer(listings, "\n\n".join(map(_described, listings)))


def _described(listing: Listing) -> str:
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


async def show(broker: AbstractConnection, arguments: argparse.Namespace) -> Answer:
    """Show one dead letter with its headers and body, which may hold personal data; it stays where it is."""
    queue = dead_letter_queues.queue_named(arguments.queue)
    if (arguments.message_id is None) == (arguments.position is None):
        raise InvalidArgument("name the message, by its id or with --position")
    opened = await dead_letter_queues.show_letter(
        broker,
        queue,
        message_id=arguments.message_id,
        position=arguments.position,
        limit=arguments.limit,
    )
    facts = {
        "message id": opened.letter.message_id,
        "type": opened.letter.type,
        "reason": opened.letter.reason,
        **opened.headers,
    }
    said = "\n".join(f"{printable(name)}: {printable(str(value))}" for name, value in facts.items())
    return Answer(opened, f"{said}\n\n{printable(opened.body)}")


async def redrive(broker: AbstractConnection, arguments: argparse.Namespace) -> Answer:
    """Move dead letters back to the end of their queue, in order. A crash may leave one in both places."""
    queue = dead_letter_queues.queue_named(arguments.queue)
    redriven = await dead_letter_queues.redrive(
        broker, queue, message_ids=arguments.message_ids or (), limit=arguments.limit
    )
    lines = [f"{len(redriven.moved)} messages moved to {redriven.queue}, {redriven.left} left"]
    lines += [f"{printable(message_id)}: not among those looked at" for message_id in redriven.not_found]
    return Answer(redriven, "\n".join(lines))
