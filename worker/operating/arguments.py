"""What operators may write on the command line: read, or refused with one clear sentence."""

from datetime import UTC, datetime
from uuid import UUID

from service.identifiers import parse_uuid
from service.outbox.events import EVENT_TYPES

_LARGEST_COUNT = 10_000
_SMALLEST, _LARGEST = 0.1, 100_000_000.0


class InvalidArgument(Exception):
    """What was asked for makes no sense."""


def request_id(text: str) -> UUID:
    """Read the uuid of a request. Raises InvalidArgument."""
    read = parse_uuid(text)
    if read is None:
        raise InvalidArgument(f"{text!r} is not the uuid of a request: req_ and 22 letters or digits")
    return read


def event_type(text: str) -> str:
    """Read the type of an event of ours. Raises InvalidArgument."""
    if text not in EVENT_TYPES:
        raise InvalidArgument(f"{text!r} is not one of {', '.join(EVENT_TYPES)}")
    return text


def time(text: str) -> datetime:
    """Read a time in ISO 8601, in UTC if it does not say. Raises InvalidArgument."""
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"{text!r} is not a time like 2026-01-31T09:30:00Z") from None
    return read if read.tzinfo else read.replace(tzinfo=UTC)


def count(text: str) -> int:
    """Read a number of things. Raises InvalidArgument."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _LARGEST_COUNT):
        raise InvalidArgument(f"{text!r} is not a number from 1 to {_LARGEST_COUNT}")
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
