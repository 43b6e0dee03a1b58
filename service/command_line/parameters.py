"""Types of the commands' arguments, for click's `type=`."""

import re
from contextlib import suppress
from datetime import MAXYEAR, UTC, datetime, timedelta
from typing import TypeAlias, cast
from uuid import UUID

import click

from service import text_rules
from service.calculation_requests import email_addresses
from service.identifiers import parse_uuid
from service.postgres.pool import Connection

Time: TypeAlias = datetime | timedelta  # or a span before now


def line(text: str) -> str:
    """Read a line of text, such as a name, without the spaces around it."""
    text = text.strip()
    if fault := text_rules.check_filled_line(text):
        raise click.BadParameter(fault.message)
    if len(text) > text_rules.CHARACTERS:
        raise click.BadParameter(f"more than {text_rules.CHARACTERS} characters")
    return text


def uuid(text: str) -> UUID:
    """Read the uuid of a request, or the id that its row has."""
    with suppress(ValueError):
        return parse_uuid(text) or UUID(text)
    raise click.BadParameter(f"{text!r} is not the uuid of a request: req_ and 22 letters or digits")


def email_address(text: str) -> str:
    """Read an e-mail address, as the API accepts it."""
    if fault := email_addresses.find_fault(text):
        raise click.BadParameter(fault)
    return text


def time(text: str) -> Time:
    """Read a time: ISO 8601, in UTC unless it has an offset; or a span before now, such as 90m, 2h or 3d."""
    if span := re.fullmatch("([0-9]{1,4})([mhd])", text):
        return int(span[1]) * timedelta(minutes={"m": 1, "h": 60, "d": 1440}[span[2]])
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        read = datetime.min  # noqa: DTZ901 - refused below
    if not 1970 < read.year < MAXYEAR:  # No request is older. Later times overflow in calculations.
        raise click.BadParameter(f"{text!r} is not a time like 2026-01-31T09:30:00Z, or 2h")
    return read if read.tzinfo else read.replace(tzinfo=UTC)


async def at(connection: Connection, given: Time | None) -> datetime | None:
    """Return a given time. A span ends now by the clock of Postgres, which dated the rows."""
    if isinstance(given, timedelta):
        given = cast("datetime", await connection.fetchval("SELECT now() - $1::interval", given))
    return given


COUNT = click.IntRange(1, 10_000)
limit = click.option("--limit", type=COUNT, default=50, show_default=True, help="The most to show.")
_TIME = "Only since TIME: ISO 8601, or 2h for two hours ago."
since = click.option("--from", "since", type=time, metavar="TIME", help=_TIME)
firm = click.option("--conveyancer", "conveyancer_id", metavar="ID", type=line, help="Only this firm's.")
