"""Runs the commands of operators in the event loop of the tests, several at once if need be."""

import os
from typing import Any, cast
from unittest.mock import patch

import click
import msgspec
import pytest

import service.__main__
import worker.__main__
from service.command_line.answering import Answer
from tests.harness import databases
from tests.harness.processes import environment_of
from tests.worker.conftest import announce_next, hold_events
from tests.worker.steps import attempt_emails


def _commands(words: tuple[str, ...], found: click.Command) -> dict[tuple[str, ...], click.Command]:
    if not isinstance(found, click.Group):
        return {words: found}
    parts = [_commands((*words, name), part) for name, part in found.commands.items()]
    return {words: command for part in parts for words, command in part.items()}


# Every command of both programs, by the words after `python -m`.
COMMANDS = {
    **_commands(("service",), service.__main__.PROGRAM),
    **_commands(("worker",), worker.__main__.PROGRAM),
}


@pytest.fixture
def on_servers(worker_settings):
    """Set the environment, in which commands find their settings, to the servers of the test."""
    url = databases.as_role(worker_settings.database_url, "operator")
    with patch.dict(os.environ, environment_of(worker_settings, DATABASE_URL=url)):
        yield


async def command(*words: str) -> Any:
    """Return the Answer of an operator's command, of either program. Needs the fixture `on_servers`."""
    name = next(name for name in COMMANDS if name[1:] == words[: len(name) - 1])
    with COMMANDS[name].make_context(name[-1], list(words[len(name) - 1 :])) as context:
        del context.params["as_json"]
        run = cast("Any", COMMANDS[name].callback).__wrapped__
        return await run(**context.params)


def rendered(answer: Answer) -> str:
    return answer.text + msgspec.json.encode(answer.data).decode()


@pytest.fixture
async def refused(database, postman, mail_server, intended):
    mail_server.rcpt_reply = "550 5.1.1 no such user"
    await attempt_emails(database, postman)
    return intended


@pytest.fixture
async def retrying(database, stored_request):
    """A request whose request.created was refused three times, and whose next event waits behind it."""
    await announce_next(database, stored_request.id)
    await hold_events(database, stored_request.id)
    await database.execute(
        "UPDATE outbox SET attempts = 3, last_error = 'returned: no queue is bound for it' WHERE sequence = 1"
    )
    return stored_request
