"""Runs commands and prints their answers, on top of click.

A command is an async function that returns an Answer, below click's decorators and `@answering` or, if it
changes something, `@on_record`. Errors that `run` expects are printed as one line.
"""

import functools
import getpass
import json
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import click
import msgspec
import structlog
import uvloop

from service.addresses import EventLoop
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import AlreadyWithdrawn, RequestNotFound
from service.command_line import parameters
from service.command_line.connecting import EXPLAINED
from service.identifiers import uuid_of

_WIDEST_CELL = 100
_EXPECTED: tuple[type[Exception], ...] = (
    *EXPLAINED,
    *(OSError, AlreadyWithdrawn, RequestNotFound, UnknownConveyancer),
)


class Answer(msgspec.Struct, frozen=True):
    """The result of a command, as data for scripts and as text for people, with the exit status."""

    data: object
    text: str
    status: int = 0
    note: str = ""  # for standard error, so that it does not get between the data

    @classmethod
    def listing(cls, rows: Sequence[asyncpg.Record | Mapping[str, Any]], *, status: int = 0) -> "Answer":
        """Return the answer of a command that lists the rows of a statement, with their columns.

        A column `total` is how many rows there are without a limit. The note says if these are more.
        """
        found = [{name: value for name, value in row.items() if name != "total"} for row in rows]
        headings = [*found[0]] if found else ["none"]
        total = rows[0].get("total", 0) if rows else 0
        note = f"{len(found)} of {total} are shown: --limit shows more." if total > len(found) else ""
        return cls(found, table(headings, [[*row.values()] for row in found]), status, note)


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
            answer = uvloop.run(function(**arguments), loop_factory=EventLoop)
        except KeyboardInterrupt:
            kept = "Interrupted. Work done so far is kept, and the command can be run again."
            raise click.ClickException(kept) from None
        click.echo(_as_json(answer.data) if as_json else answer.text)
        if answer.note:
            click.echo(answer.note, err=True)
        return answer.status

    return callback


def _as_json(data: object) -> str:
    """Return JSON. It escapes control and bidirectional characters, which could manipulate the terminal."""
    return json.dumps(msgspec.to_builtins(data, builtin_types=[UUID]), indent=2, default=uuid_of)


class Operator(msgspec.Struct, frozen=True):
    """The operator who runs a command, and why."""

    name: str
    note: str | None


def on_record(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do what `answering` does for a command that changes something. Adds --by and --note, for its *by*."""

    @click.option(
        "--by", metavar="NAME", default=_login, type=parameters.line, help="Who acts. Default: your login."
    )
    @click.option("--note", metavar="TEXT", type=parameters.line, help="Why, without personal data.")
    @functools.wraps(function)
    def callback(*, by: str, note: str | None, **arguments: Any) -> Any:  # noqa: ANN401 - click's
        return function(by=Operator(by, note), **arguments)

    return answering(callback)


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # In a container the user often has no name.
        return f"uid {os.getuid()}"


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
        case UUID():  # of a request
            return uuid_of(value)
    text = printable(str(value))
    return text if len(text) <= _WIDEST_CELL else text[: _WIDEST_CELL - 1] + "…"


def printable(text: str) -> str:
    """Escape the control and bidirectional characters of *text*, which could manipulate a terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
