"""A Postgres or RabbitMQ that answers, wherever it runs, and how to check that."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

import aio_pika
import aio_pika.exceptions
import asyncpg

from deploy.local.machine.processes import Process

_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Server:
    """Where it answers, and its process if it is a child of this one."""

    url: str
    trouble: Callable[[], str | None] = lambda: None  # how it ended, or None while it runs
    last_lines: Callable[[], str] = lambda: ""  # of its log
    process: Process | None = None


class NotHere(Exception):
    """This kind of server is unavailable on this machine. The text, if any, says why."""


class NoAnswer(Exception):
    """The server at a URL cannot be used. The text says why, without the password in the URL."""


def check_postgres(url: str) -> None:
    """Log in to Postgres once. Raises NoAnswer."""
    try:
        _run(_log_in_to_postgres(url))
    except (OSError, TimeoutError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise NoAnswer(_reason(error, url)) from None


def check_rabbitmq(url: str) -> None:
    """Log in to RabbitMQ once. Raises NoAnswer."""
    try:
        _run(_log_in_to_rabbitmq(url))
    except (OSError, TimeoutError, ValueError, aio_pika.exceptions.AMQPError) as error:
        raise NoAnswer(_reason(error, url)) from None


def answers(check: Callable[[str], None], url: str) -> bool:
    """Return whether *check* succeeds at *url*."""
    try:
        check(url)
    except NoAnswer:
        return False
    return True


async def _log_in_to_postgres(url: str) -> None:
    connection = await asyncpg.connect(url, timeout=_ANSWER_SECONDS)
    await connection.close(timeout=_ANSWER_SECONDS)


async def _log_in_to_rabbitmq(url: str) -> None:
    async with asyncio.timeout(_ANSWER_SECONDS):
        connection = await aio_pika.connect(url)
        await connection.close()


def _run(work: Coroutine[None, None, None]) -> None:
    """Run *work* in another thread, so that the caller's may have an event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


def _reason(error: Exception, url: str) -> str:
    """Return the first line of an error, or its class if it has no text, without passwords."""
    if isinstance(error, TimeoutError):
        return f"no answer within {_ANSWER_SECONDS:.0f} seconds"
    lines = str(error).splitlines() or [type(error).__name__]
    reason = lines[0]
    for password in _passwords(url):
        reason = reason.replace(password, "***")
    return reason


def _passwords(url: str) -> set[str]:
    """Return every spelling in which an error may quote a URL's passwords."""
    try:
        parts = urlsplit(url)
        password = parts.password or ""
        others = parse_qs(parts.query).get("password", [])
    except ValueError:
        # Not a URL: all of it may be secret.
        return {url}
    return {spelling for each in (password, *others) for spelling in (each, unquote(each))} - {""}
