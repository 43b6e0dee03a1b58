"""Runs the commands of operators in the event loop of the tests, several at once if need be."""

import os
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import patch

import click
import msgspec
import pytest

from service.command_line import Answer
from worker.__main__ import PROGRAM
from worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment, in which commands find their settings."""
    with patch.dict(os.environ):
        yield


def find_command(words: tuple[str, ...]) -> tuple[click.Command, list[str]]:
    """Return the command that these words name, and its arguments."""
    found: click.Command = PROGRAM
    rest = list(words)
    while isinstance(found, click.Group):
        found = found.commands[rest.pop(0)]
    return found, rest


async def command(settings: WorkerSettings, *words: str) -> Answer:
    """Return the answer of a command of `python -m worker` on the servers of *settings*."""
    os.environ |= {"DATABASE_URL": settings.database_url, "AMQP_URL": settings.amqp_url}
    found, arguments = find_command(words)
    with found.make_context(found.name, arguments) as context:
        del context.params["as_json"]
        run = cast("Any", found.callback).__wrapped__
        answer = await run(**context.params)
    assert isinstance(answer, Answer)
    return answer


def rendered(answer: Answer) -> str:
    """Return an answer in both forms that are printed."""
    return answer.text + msgspec.json.encode(answer.data).decode()
