"""What every command of both command lines does: its answer, its errors and its arguments."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest

from service.command_line import parameters
from service.command_line.answering import Answer, answering, cell, printable
from service.command_line.answering import run as main
from service.identifiers import parse_uuid
from tests.harness.command_line import restored_logging

UUID = "req_0000000000000000000000"


def run(function: Any, *words: str, options: tuple[click.Parameter, ...] = ()) -> int:
    """Run *function* as the only command of a program, outside the event loop of the tests."""
    program = click.Group("program")
    command = program.command("go")(answering(function))
    command.params.extend(options)
    with restored_logging():
        return main(program, ["go", *words])


def raising(error: BaseException) -> Any:
    async def go() -> Answer:
        raise error

    return go


async def show(value: object) -> Answer:
    return Answer({"value": str(value)}, "a value", status=1)


def test_answer_is_text_or_json_which_cannot_manipulate_the_terminal(capsys):
    id_ = parse_uuid(UUID)

    async def go() -> Answer:
        return Answer({"said": "\x1b\x9b\u202eé", "uuid": id_}, "a text")

    assert run(go) == 0
    assert capsys.readouterr() == ("a text\n", "")

    assert run(go, "--json") == 0
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"said": "\x1b\x9b\u202eé", "uuid": UUID}


@pytest.mark.parametrize(("ago", "minutes"), [("90m", 90), ("2h", 120), ("3d", 3 * 24 * 60)])
async def test_time_may_be_a_span_before_now_by_the_clock_of_postgres(ago, minutes, database):
    async with database.transaction():
        now = await database.fetchval("SELECT now()")
        given = await parameters.at(database, parameters.time(ago))

    assert given == now - timedelta(minutes=minutes)


def test_error_is_one_line_that_cannot_manipulate_the_terminal(capsys):
    """Which errors are expected: tests/worker/commands/test_commands.py."""
    assert run(raising(click.ClickException("a\x1b[2J"))) == 1
    assert capsys.readouterr() == ("", "a\\x1b[2J\n")


def test_unexpected_error_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()))


@pytest.mark.parametrize(
    ("kind", "word", "value"),
    [
        (parameters.uuid, UUID, "00000000-0000-0000-0000-000000000000"),
        (parameters.uuid, "00000000-0000-0000-0000-000000000000", "00000000-0000-0000-0000-000000000000"),
        (parameters.time, "2026-01-31T09:30:00Z", datetime(2026, 1, 31, 9, 30, tzinfo=UTC)),
        (parameters.time, "2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        (parameters.line, "é" * 255, "é" * 255),
    ],
)
def test_argument_is_read(kind, word, value, capsys):
    assert run(show, word, "--json", options=(click.Argument(["value"], type=kind),)) == 1
    assert json.loads(capsys.readouterr().out) == {"value": str(value)}


@pytest.mark.parametrize(
    ("kind", "word", "part"),
    [
        (parameters.uuid, "req_short\x1b[2J", "'req_short\\x1b[2J' is not the uuid of a request"),
        (parameters.time, "yesterday", "'yesterday' is not a time like 2026-"),
        *(
            (parameters.time, text, "is not a time like")
            for text in ("0001-01-01", "9999-12-31T23:59Z", "2w", "1.5h", "9" * 9 + "d", "\u0662h")
        ),
        *((parameters.line, text, "must not be blank") for text in ("", " ", "\u200b")),
        *((parameters.line, f"a{bad}", "characters") for bad in ("\u202e", "\nb", "\0", "\udcff", "x" * 255)),
    ],
)
def test_invalid_argument_is_bad_usage(kind, word, part, capsys):
    assert run(show, word, options=(click.Argument(["value"], type=kind),)) == 2

    errors = capsys.readouterr().err
    assert part in errors
    assert "\x1b" not in errors


def test_cells_cannot_manipulate_the_terminal():
    assert printable("a\x1b[31m\n\u202eb\\") == "a\\x1b[31m\\n\\u202eb\\"
    assert cell("x" * 500) == "x" * 99 + "…"
