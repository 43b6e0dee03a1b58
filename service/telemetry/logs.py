"""Logs in JSON, without personal or secret data. The line for each HTTP request is in api/outer_layer.py."""

import logging
import sys
import traceback
from contextlib import suppress
from typing import Any

import asyncpg
import msgspec
import structlog
from structlog.processors import JSONRenderer, TimeStamper, add_log_level
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from service.settings import Settings

_SHARED: list[Processor] = [structlog.contextvars.merge_contextvars, add_log_level, TimeStamper(fmt="iso")]
# msgspec takes 4 µs less than json.dumps.
_IN_JSON = JSONRenderer(lambda event, default: msgspec.json.encode(event, enc_hook=default).decode())


def configure(settings: Settings) -> None:
    """Send our logs, and the warnings and errors of libraries, to standard output, in one format.

    Our own logs bypass the standard library's logging, which takes several times as long.
    """
    structlog.configure(
        processors=[*_SHARED, _IN_JSON],
        logger_factory=_StandardOutput,
        wrapper_class=structlog.make_filtering_bound_logger(settings.log_level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    processors: list[Processor] = [ProcessorFormatter.remove_processors_meta, _IN_JSON]
    handler.setFormatter(ProcessorFormatter(processors=processors, foreign_pre_chain=[*_SHARED, _tame]))
    # Below this level some libraries print addresses and URLs.
    level = "ERROR" if settings.log_level == "ERROR" else "WARNING"
    logging.basicConfig(handlers=[handler], level=level, force=True)
    # aiormq's errors quote messages. The code that needs a connection logs outages.
    logging.getLogger("aiormq").setLevel("CRITICAL")


class _StandardOutput:
    """structlog's PrintLogger, except that a line that cannot be written does not stop the work."""

    def info(self, line: str) -> None:
        """Write a line of any level."""
        with suppress(OSError, ValueError):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    debug = warning = error = critical = info


def to_standard_error() -> FilteringBoundLogger:
    """Return a logger for a command, which logs nothing else, because its standard output is its answer."""
    log: FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr), processors=[*_SHARED, _IN_JSON]
    )
    return log


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


def about(uuid: str | None, traceparent: str | None, **ids: str | None) -> dict[str, Any]:
    """Return the ids that are known, under the names that the logs of every process use."""
    fields = {"uuid": uuid, "trace_id": traceparent and traceparent[3:35], **ids}
    return {name: value for name, value in fields.items() if value is not None}


def summarize(error: BaseException) -> str:
    """Return the class of an expected exception and the classes of its causes, but no CancelledError."""
    name, cause = type(error).__name__, error.__cause__
    return f"{name} ({summarize(cause)})" if isinstance(cause, Exception) else name


def _tame(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Replace the traceback in a library's log line with what `describe` returns."""
    exc_info = event.pop("exc_info", None)
    if isinstance(exc_info, tuple) and exc_info[1] is not None:
        event.update(describe(exc_info[1]))
        # asyncio appends the formatted exception, including values, below its own line.
        event["event"] = str(event["event"]).partition("\n")[0]
    return event
