"""Runs the commands of operators in the event loop of the tests, several at once if need be."""

import os
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import patch

import click
import msgspec
import pytest

import service.__main__
import worker.__main__
from service.command_line import Answer
from worker.settings import WorkerSettings

PROGRAMS = {"service": service.__main__.PROGRAM, "worker": worker.__main__.PROGRAM}


def _commands(
    words: tuple[str, ...], found: click.Command
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(found, click.Group):
        for name, part in found.commands.items():
            yield from _commands((*words, name), part)
    else:
        yield words, found


# Every command of both programs, by the words after `python -m`.
COMMANDS = {
    words: found for name, program in PROGRAMS.items() for words, found in _commands((name,), program)
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the environment, in which commands find their settings."""
    with patch.dict(os.environ):
        yield


async def command(settings: WorkerSettings, *words: str) -> Any:
    """Return the Answer of an operator's command, of either program, on the servers of *settings*."""
    os.environ |= {
        "DATABASE_URL": settings.database_url,
        "AMQP_URL": settings.amqp_url,
        "APP_URL": settings.app_url,
        "REQUEST_SECRET_KEYS": settings.request_secret_keys,
    }
    name = next(name for name in COMMANDS if name[1:] == words[: len(name) - 1])
    with COMMANDS[name].make_context(name[-1], list(words[len(name) - 1 :])) as context:
        del context.params["as_json"]
        run = cast("Any", COMMANDS[name].callback).__wrapped__
        return await run(**context.params)


def rendered(answer: Answer) -> str:
    """Return an answer in both forms that are printed."""
    return answer.text + msgspec.json.encode(answer.data).decode()
