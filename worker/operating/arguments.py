"""The words of the command line: how a command is added to the parser, and the types of its arguments."""

import argparse
from collections.abc import Awaitable, Callable, Mapping
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from typing import TypeAlias
from uuid import UUID

from service.identifiers import parse_uuid
from service.outbox.events import EVENT_TYPES
from worker.operating.answers import Answer, OperatorError

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - its only name
Run = Callable[[argparse.Namespace, Mapping[str, str]], Awaitable[Answer]]  # given the environment

_LARGEST_COUNT = 10_000
_SMALLEST, _LARGEST = 0.1, 100_000_000.0


class InvalidArgument(OperatorError):
    """An argument of the command is invalid."""


def add_command(commands: Subcommands, name: str, run: Run) -> argparse.ArgumentParser:
    """Add a command to the parser. The docstring of *run* is its help."""
    command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")
    command.set_defaults(run=run)
    return command


def add_group(commands: Subcommands, name: str, description: str) -> Subcommands:
    """Add a command that consists of subcommands."""
    group = commands.add_parser(name, help=description, description=description)
    return group.add_subparsers(required=True, metavar="COMMAND")


# These raise InvalidArgument, not the error of argparse, which prints the usage and exits with status 2.


def request_id(text: str) -> UUID:
    """Read the uuid of a request. Raises InvalidArgument."""
    read = parse_uuid(text)
    if read is None:
        raise InvalidArgument(f"{text!r} is not the uuid of a request: req_ and 22 letters or digits")
    return read


def event_type(text: str) -> str:
    """Read the type of an event. Raises InvalidArgument."""
    if text not in EVENT_TYPES:
        raise InvalidArgument(f"{text!r} is not one of {', '.join(EVENT_TYPES)}")
    return text


def time(text: str) -> datetime:
    """Read a time in ISO 8601. Without an offset it is UTC. Raises InvalidArgument."""
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"{text!r} is not a time like 2026-01-31T09:30:00Z") from None
    # Commands calculate with times: some of the first or last day there is would be out of range.
    if read.year in {MINYEAR, MAXYEAR}:
        raise InvalidArgument(f"{text!r} is too long ago, or too far away")
    return read if read.tzinfo else read.replace(tzinfo=UTC)


def count(text: str) -> int:
    """Read a number of things. Raises InvalidArgument."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _LARGEST_COUNT):
        raise InvalidArgument(f"{text!r} is not a number from 1 to {_LARGEST_COUNT}")
    return int(text)


def smtp_code(text: str) -> int:
    """Read the code of a mail server's refusal. Raises InvalidArgument."""
    if not (text.isascii() and text.isdigit() and len(text) == 3 and text[0] in "45"):
        raise InvalidArgument(f"{text!r} is not the code of a mail server's refusal, such as 450 or 550")
    return int(text)


def positive(text: str) -> float:
    """Read a duration or a rate. Raises InvalidArgument."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not _SMALLEST <= number <= _LARGEST:
        raise InvalidArgument(f"{text!r} is not a number from {_SMALLEST} to {_LARGEST}")
    return number
