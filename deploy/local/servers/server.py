"""A Postgres or RabbitMQ that answers, wherever it runs, and how to check that."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
import aio_pika.exceptions
import asyncpg

from deploy.local.machine.processes import Process

_ANSWER_SECONDS = 5.0
_LOGIN_ERRORS = (
    OSError,
    TimeoutError,
    ValueError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    aio_pika.exceptions.AMQPError,
)


@dataclass(frozen=True)
class Server:
    """Where it answers, and its process if it is a child of this one."""

    url: str
    trouble: Callable[[], str | None] = lambda: None  # how it ended, or None while it runs
    last_lines: Callable[[], str] = lambda: ""  # of its log
    process: Process | None = None
    client: Sequence[str | Path] = ()  # runs psql or rabbitmqctl there


class NotHere(Exception):
    """This kind of server is unavailable on this machine. The text, if any, says why."""


def trouble_of_postgres(url: str) -> str | None:
    """Log in to Postgres once, and return why that fails, or None."""
    return _trouble(asyncpg.connect(url))


def trouble_of_rabbitmq(url: str) -> str | None:
    """Log in to RabbitMQ once, and return why that fails, or None."""
    return _trouble(aio_pika.connect(url))


def _trouble(login: Coroutine[Any, Any, Any]) -> str | None:
    """Log in and out in another thread, because the caller's may have an event loop."""

    async def log_in_and_out() -> None:
        async with asyncio.timeout(_ANSWER_SECONDS):
            connection = await login
            await connection.close()

    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, log_in_and_out()).result()
    except _LOGIN_ERRORS as error:
        return type(error).__name__  # Its text may quote the password.
    return None
