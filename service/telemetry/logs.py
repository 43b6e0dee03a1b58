"""Logs in JSON, without personal or secret data. The line for each HTTP request is in api/outer_layer.py."""

import asyncio
import json
import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec
import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor

from service.settings import Settings

# The lowest level at which each library may log. At INFO some libraries print addresses and URLs.
_LEVELS = {
    **dict.fromkeys(("aio_pika", "aiosmtplib", "asyncio", "asyncpg", "httpcore", "httpx"), "WARNING"),
    "aiormq": "CRITICAL",  # Its errors quote messages. The code that needs a connection logs outages.
}
_encoder = msgspec.json.Encoder(enc_hook=repr)


def configure(settings: Settings) -> None:
    """Send our logs and those of all libraries to standard output, in one format.

    Our own logs bypass the standard library's logging, which takes several times as long.
    """
    shared: list[Processor] = [structlog.contextvars.merge_contextvars, structlog.stdlib.add_log_level]
    structlog.configure(
        processors=[*shared, _in_json],
        logger_factory=_StandardOutput,
        wrapper_class=structlog.make_filtering_bound_logger(settings.log_level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        ProcessorFormatter(
            processors=[ProcessorFormatter.remove_processors_meta, _in_json],
            foreign_pre_chain=[*shared, _tame],
        )
    )
    logging.basicConfig(handlers=[handler], level=settings.log_level, force=True)
    for library, level in _LEVELS.items():
        logging.getLogger(library).setLevel(level)


class _StandardOutput:
    """Writes log lines. To save time, the lines of one turn of the event loop share a system call.

    A line that cannot be written must not stop the work.
    """

    def __init__(self, *_: object) -> None:
        self._is_flushing = False  # whether a flush at the end of this turn is due

    def info(self, line: str) -> None:
        """Write a line of any level."""
        _attempt(sys.stdout.write, f"{line}\n")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._flush()
            return
        if not self._is_flushing:
            self._is_flushing = True
            loop.call_soon(self._flush)

    debug = warning = error = critical = info

    def _flush(self) -> None:
        self._is_flushing = False
        _attempt(sys.stdout.flush)


def _attempt(operation: Callable[..., object], *arguments: str) -> None:
    try:
        operation(*arguments)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"a log line could not be written: {type(error).__name__}\n")


def _in_json(_logger: object, _method: str, event: EventDict) -> str:
    """Return the event as JSON, with its time. structlog's own processors for this took 2 µs longer."""
    event["timestamp"] = datetime.now(UTC)
    try:
        return _encoder.encode(event).decode()
    except UnicodeEncodeError:  # a lone surrogate, which the standard library escapes
        return json.dumps(msgspec.to_builtins(event, enc_hook=repr))


def line(event: str, **facts: object) -> str:
    """Return a log line for a command, which logs nothing else, because its standard output is its answer."""
    return f"{_in_json(None, 'info', {'event': event, 'level': 'info', **facts})}\n"


def describe(error: BaseException) -> dict[str, Any]:
    """Return what may be logged of an exception: class and place, but text only if it quotes no values."""
    frames = traceback.extract_tb(error.__traceback__)
    facts: dict[str, Any] = {
        "error": type(error).__name__,
        "at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:]],
    }
    if isinstance(error, asyncpg.PostgresError):
        facts["sqlstate"] = error.sqlstate
        facts["constraint"] = getattr(error, "constraint_name", None)
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        # The operating system's messages quote no values. Messages of Postgres and mail servers may.
        facts["reason"] = str(error)
    if error.__cause__ is not None:
        facts["cause"] = describe(error.__cause__)
    return facts


def about(uuid: str | None, traceparent: str | None) -> dict[str, Any]:
    """Return the uuid and the trace id, if known, under the names that the logs of every process use."""
    fields = {} if uuid is None else {"uuid": uuid}
    if traceparent is not None:
        fields["trace_id"] = traceparent[3:35]
    return fields


def summarize(error: BaseException) -> str:
    """Return the class of an expected exception and the classes of its causes."""
    name = type(error).__name__
    return name if error.__cause__ is None else f"{name} ({summarize(error.__cause__)})"


def _tame(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Replace the traceback in a library's log line with what `describe` returns."""
    exc_info = event.pop("exc_info", None)
    if isinstance(exc_info, tuple) and exc_info[1] is not None:
        event.update(describe(exc_info[1]))
        # asyncio appends the formatted exception, including values, below its own line.
        event["event"] = str(event["event"]).partition("\n")[0]
    return event
