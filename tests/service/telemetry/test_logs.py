"""Log lines: their format, their level, and failures to write them."""

import json
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiosmtplib import SMTPServerDisconnected

from service.settings import Settings
from service.telemetry import logs
from tests.harness.command_line import restored_logging


@pytest.fixture(autouse=True)
def restored():
    with restored_logging():
        yield


def configured() -> Any:
    """Configure logging as a process does; return a logger of ours."""
    logs.configure(Settings(database_url=""))
    return structlog.get_logger()


def written(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the lines written since the last call."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_our_lines_and_those_of_libraries_have_one_json_format_and_one_level(capsys):
    log = configured()
    log.debug("hidden")
    logging.getLogger("library").debug("hidden")
    log.warning("ours", odd=1j)
    logging.getLogger("library").warning("theirs %s", 2)

    ours, theirs = written(capsys)
    assert (ours["event"], ours["odd"], ours["level"]) == ("ours", "1j", "warning")
    assert (theirs["event"], theirs["level"]) == ("theirs 2", "warning")
    assert ours.keys() - {"odd"} == theirs.keys()


def test_texts_that_libraries_quote_are_not_logged(capsys):
    configured()
    logging.getLogger("httpx").info("hunter2")
    logging.getLogger("aiormq.channel").error("hunter2")
    logging.getLogger("asyncio").error("Task failed\ncontext: hunter2", exc_info=LookupError("hunter2"))

    [line] = written(capsys)
    assert (line["event"], line["level"], line["error"]) == ("Task failed", "error", "LookupError")
    assert "hunter2" not in str(line)


def test_reason_of_the_operating_system_is_described_and_that_of_a_mail_server_is_not():
    ours = logs.describe(ConnectionRefusedError(111, "Connection refused"))
    theirs = logs.describe(SMTPServerDisconnected("<ada@customer.example.com>: go away"))

    assert ours["reason"] == "[Errno 111] Connection refused"
    assert "reason" not in theirs


def test_line_that_cannot_be_written_does_not_stop_the_work(monkeypatch):
    log = configured()
    with suppress(OSError), Path("/dev/full").open("w") as full:  # Closing it fails, too.
        monkeypatch.setattr(sys, "stdout", full)

        assert log.error("lost") is None
