"""The code that the commands of `python -m service` and `python -m worker` share, on top of click.

A command is an async function that returns an Answer. Its decorators are click's and then `@answering`.
click.ClickException and the errors that `run` expects are printed as one line for the operator.
"""

import asyncio
import functools
import getpass
import json
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import MAXYEAR, UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import click
import msgspec
import structlog

from service import text_rules
from service.calculation_requests.model import RequestNotFound
from service.every_firm.operator_actions import Operator
from service.identifiers import parse_uuid
from service.outbox.events import EVENT_TYPES
from service.postgres import outages, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, connect
from service.postgres.schema import SchemaNotApplied, SchemaOutdated
from service.settings import DatabaseSettings, InvalidSetting, load

_CONNECT_SECONDS = 10.0
_STATEMENT_SECONDS = 60.0
_WIDEST_CELL = 100
_EXPECTED: tuple[type[Exception], ...] = (
    click.ClickException,
    InvalidSetting,
    OSError,
    PostgresUnavailable,
    RequestNotFound,
    SchemaNotApplied,
    SchemaOutdated,
)


class Answer(msgspec.Struct, frozen=True):
    """The result of a command, as data for scripts and as text for people, with the exit status."""

    data: object
    text: str
    status: int = 0

    @classmethod
    def listing(cls, found: Sequence[msgspec.Struct]) -> "Answer":
        """Return the answer of a command that lists structs of one type, with a column for each field."""
        headings = found[0].__struct_fields__ if found else ("none",)
        return cls(found, table(headings, map(msgspec.structs.astuple, found)))


def run(program: click.Group, words: Sequence[str], *, expects: tuple[type[Exception], ...] = ()) -> int:
    """Run one command and return the exit status: 1 on failure, after a line on stderr; 2 on bad usage."""
    try:
        status: int | None = program.main(list(words), prog_name=program.name, standalone_mode=False)
    except click.UsageError as error:
        error.show()
        return error.exit_code
    except (*_EXPECTED, *expects) as error:
        message = str(error) or error.__doc__ or type(error).__name__
        click.echo(printable(message), err=True)
        return 1
    return status or 0


def answering(function: Callable[..., Coroutine[Any, Any, Answer]]) -> Callable[..., int]:
    """Turn an async function into a click callback that prints its answer. Adds --json."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
    @functools.wraps(function)
    def callback(*, as_json: bool, **arguments: Any) -> int:  # noqa: ANN401 - click's
        # Nothing is logged, so that only the answer is printed. Errors that libraries log are also raised.
        logging.disable()
        structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
        try:
            answer = asyncio.run(function(**arguments))
        except KeyboardInterrupt:
            kept = "Interrupted. Work done so far is kept, and the command can be run again."
            raise click.ClickException(kept) from None
        show(answer, as_json=as_json)
        return answer.status

    return callback


def show(answer: Answer, *, as_json: bool) -> None:
    """Print an answer to stdout."""
    # json.dumps escapes control and bidirectional characters, which could manipulate the terminal.
    click.echo(json.dumps(msgspec.to_builtins(answer.data), indent=2) if as_json else answer.text)


# Argument types, for click's `type=`.


def line(text: str) -> str:
    """Read a line of text, such as a name."""
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


def time(text: str) -> datetime:
    """Read a time: ISO 8601, in UTC unless it has an offset; or a span before now, such as 90m, 2h or 3d."""
    if span := re.fullmatch("([0-9]{1,4})([mhd])", text):
        return datetime.now(UTC) - int(span[1]) * timedelta(minutes={"m": 1, "h": 60, "d": 1440}[span[2]])
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        read = datetime.min  # noqa: DTZ901 - refused below
    if not 1970 < read.year < MAXYEAR:  # No request is older. Later times overflow in calculations.
        raise click.BadParameter(f"{text!r} is not a time like 2026-01-31T09:30:00Z, or 2h")
    return read if read.tzinfo else read.replace(tzinfo=UTC)


EVENT_TYPE = click.Choice(EVENT_TYPES)
COUNT = click.IntRange(1, 10_000)
SMTP_REFUSAL = click.IntRange(400, 599)
POSITIVE = click.IntRange(1, 100_000_000)


def on_record(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --by and --note to a command that changes something. The command gets both as *by*."""

    @click.option("--by", metavar="NAME", default=_login, type=line, help="Who acts. Default: your login.")
    @click.option("--note", metavar="TEXT", type=line, help="Why, without personal data.")
    @functools.wraps(function)
    def callback(*, by: str, note: str | None, **arguments: Any) -> Any:  # noqa: ANN401 - click's
        return function(by=Operator(by, note), **arguments)

    return callback


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # In a container the user often has no name.
        return f"uid {os.getuid()}"


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress on a terminal, unless --json is given. Yields a function to report finished steps."""
    hidden = click.get_current_context().params.get("as_json", False) or not sys.stderr.isatty()
    with click.progressbar(length=total, label=label, show_pos=True, file=sys.stderr, hidden=hidden) as bar:
        yield bar.update


@asynccontextmanager
async def postgres(
    *, checks_schema: bool = True, statement_seconds: float | None = _STATEMENT_SECONDS
) -> AsyncIterator[Connection]:
    """Open a direct connection to Postgres. A standby is enough for commands that only read.

    Raises InvalidSetting, PostgresUnavailable and SchemaOutdated, or ClickException if access or a lock is
    denied.
    """
    try:
        connection = await _connect(load(DatabaseSettings).database_url, statement_seconds)
        try:
            if checks_schema and await schema.read_version(connection) < schema.VERSION:
                raise SchemaOutdated
            yield connection
        finally:
            await connection.close(timeout=_CONNECT_SECONDS)
    except asyncpg.ReadOnlySQLTransactionError:
        raise PostgresUnavailable("Postgres at DATABASE_URL takes no writes: is it a standby?") from None
    except (
        asyncpg.InsufficientPrivilegeError,
        asyncpg.InvalidSchemaNameError,
        asyncpg.DuplicateTableError,
    ) as error:
        needed = "Has the user of DATABASE_URL the rights of calculation_requests_operator?"
        if not checks_schema:
            needed = "Is the user of DATABASE_URL the owner of the schema?"
        refusal = f"Postgres refused: {error}. {needed}"
        raise click.ClickException(refusal) from None
    except asyncpg.LockNotAvailableError:
        held = "Another transaction has locked the same rows. Find it in pg_stat_activity, then try again."
        raise click.ClickException(held) from None
    except outages.OUTAGE_ERRORS as error:
        reason = f"is unreachable ({type(error).__name__})."
        if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
            reason = "rejects the login."
        raise PostgresUnavailable(f"Postgres at DATABASE_URL {reason}") from error


async def _connect(url: str, statement_seconds: float | None) -> Connection:
    try:
        return await connect(
            url,
            timeout=_CONNECT_SECONDS,
            command_timeout=statement_seconds,
            statement_cache_size=0,  # not every pooler supports prepared statements
            server_settings={"application_name": "calculation-requests operator"},
        )
    except ValueError as error:
        if outages.is_outage(error):  # A rejected certificate may be renewed.
            raise
        raise InvalidSetting("DATABASE_URL: not the address of a Postgres server") from None


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return *rows* in aligned columns."""
    written = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *written, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in (headings, *written)
    )


def cell(value: object) -> str:
    """Return a value as text for a table, truncated if it is long."""
    match value:
        case None:
            return "-"
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        case float():
            return f"{value:.1f}"
    text = printable(str(value))
    return text if len(text) <= _WIDEST_CELL else text[: _WIDEST_CELL - 1] + "…"


def printable(text: str) -> str:
    """Escape the control and bidirectional characters of *text*, which could manipulate a terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
