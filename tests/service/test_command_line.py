"""What every command of both command lines does: its answer, its errors and its arguments."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest

from service import command_line
from service.calculation_requests.model import RequestNotFound
from service.command_line import Answer, answering, cell, on_record, printable, table
from service.every_firm.operator_actions import Operator
from service.settings import InvalidSetting
from tests.harness.command_line import restored_logging

UUID = "req_0000000000000000000000"


def run(function: Any, *words: str, options: tuple[click.Parameter, ...] = ()) -> int:
    """Run *function* as the only command of a program, outside the event loop of the tests."""
    program = click.Group("program")
    command = program.command("go")(answering(function))
    command.params.extend(options)
    with restored_logging():
        return command_line.run(program, ["go", *words])


def raising(error: BaseException) -> Any:
    async def go() -> Answer:
        raise error

    return go


async def show(value: object) -> Answer:
    return Answer({"value": str(value)}, "a value", status=1)


def test_answer_is_text_or_json_which_cannot_manipulate_the_terminal(capsys):
    async def go() -> Answer:
        with command_line.progress("going", 2) as advance:  # silent without a terminal
            advance(2)
        return Answer({"said": "\x1b\x9b\u202eé"}, "a text")

    assert run(go) == 0
    assert capsys.readouterr() == ("a text\n", "")

    assert run(go, "--json") == 0
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"said": "\x1b\x9b\u202eé"}


@pytest.mark.parametrize(("ago", "minutes"), [("90m", 90), ("2h", 120), ("3d", 3 * 24 * 60)])
def test_time_may_be_a_span_before_now(ago, minutes):
    span = timedelta(minutes=minutes)
    assert abs(datetime.now(UTC) - span - command_line.time(ago)) < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (click.ClickException("a\x1b[2J"), "a\\x1b[2J"),
        (InvalidSetting("missing environment variable `X`"), "missing environment variable `X`"),
        (RequestNotFound(), "There is no such request."),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (KeyboardInterrupt(), "Interrupted."),
    ],
)
def test_expected_error_is_one_line(error, line, capsys):
    assert run(raising(error)) == 1
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(line)


def test_unexpected_error_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()))


@pytest.mark.parametrize(
    ("kind", "word", "value"),
    [
        (command_line.uuid, UUID, "00000000-0000-0000-0000-000000000000"),
        (command_line.time, "2026-01-31T09:30:00Z", datetime(2026, 1, 31, 9, 30, tzinfo=UTC)),
        (command_line.time, "2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        (command_line.line, "é" * 255, "é" * 255),
        (command_line.COUNT, "10000", 10_000),
        (command_line.EVENT_TYPE, "request.created", "request.created"),
    ],
)
def test_argument_is_read(kind, word, value, capsys):
    assert run(show, word, "--json", options=(click.Argument(["value"], type=kind),)) == 1
    assert json.loads(capsys.readouterr().out) == {"value": str(value)}


@pytest.mark.parametrize(
    ("kind", "word", "part"),
    [
        (command_line.uuid, "req_short\x1b[2J", "'req_short\\x1b[2J' is not the uuid of a request"),
        (command_line.time, "yesterday", "'yesterday' is not a time like 2026-"),
        *(
            (command_line.time, text, "is not a time like")
            for text in ("0001-01-01", "9999-12-31T23:59Z", "2w", "1.5h", "9" * 9 + "d", "\u0662h")
        ),
        *((command_line.line, text, "must not be blank") for text in ("", " ", "\u200b")),
        *(
            (command_line.line, f"a{bad}", "characters")
            for bad in ("\u202e", "\nb", "\0", "\udcff", "x" * 255)
        ),
        (command_line.COUNT, "0", "0 is not in the range 1<=x<=10000"),
        (command_line.SMTP_REFUSAL, "250", "not in the range 400<=x<=599"),
        (command_line.POSITIVE, "nan", "not a valid integer"),
        (command_line.EVENT_TYPE, "x", "'x' is not one of 'request.created'"),
    ],
)
def test_invalid_argument_is_bad_usage(kind, word, part, capsys):
    assert run(show, word, options=(click.Argument(["value"], type=kind),)) == 2

    errors = capsys.readouterr().err
    assert part in errors
    assert "\x1b" not in errors


async def test_operator_and_note_are_handed_on(capsys):
    async def change(by: Operator) -> Answer:
        return Answer(by, by.name)

    assert await asyncio.to_thread(run, on_record(change), "--by", "Ada", "--note", "a test", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"name": "Ada", "note": "a test"}
    for words in (("--by", " "), ("--note", "not UTF-8: \udcff")):
        assert await asyncio.to_thread(run, on_record(change), *words) == 2
        assert f"Invalid value for '{words[0]}'" in capsys.readouterr().err


def test_cells_cannot_manipulate_the_terminal():
    assert printable("a\x1b[31m\n\u202eb\\") == "a\\x1b[31m\\n\\u202eb\\"
    assert cell("x" * 500) == "x" * 99 + "…"


def test_columns_are_aligned():
    assert table(("name", "n"), [("a", 1), ("bc", 22.25)]) == "name  n\na     1\nbc    22.2"
