"""Log lines: their format, their level, and failures to write them."""

import json
import subprocess
import sys

import pytest

_BEGIN = """
import logging, os, sys, structlog
from service.telemetry import logs
from service.settings import Settings
settings = Settings(database_url="postgresql://host/database", app_url="https://app.example.com",
                    request_secret_keys="", log_format={log_format!r})
logs.configure(settings)
log = structlog.get_logger()
"""


def run(script: str, *, log_format: str = "json") -> "subprocess.CompletedProcess[str]":
    """Log from a separate process, because logging is configured once per process."""
    return subprocess.run(
        [sys.executable, "-c", _BEGIN.format(log_format=log_format) + script],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )


def test_our_lines_and_those_of_libraries_have_one_json_format() -> None:
    written = run(
        "log.warning('ours', number=1)\nlogging.getLogger('library').warning('theirs %s', 2)"
    ).stdout

    ours, theirs = map(json.loads, written.splitlines())
    assert (ours["event"], ours["number"], ours["level"]) == ("ours", 1, "warning")
    assert (theirs["event"], theirs["level"]) == ("theirs 2", "warning")
    assert ours.keys() - {"number"} == theirs.keys()


def test_level_applies_to_our_lines_and_those_of_libraries() -> None:
    written = run("log.debug('ours')\nlogging.getLogger('library').debug('theirs')\nlog.info('shown')").stdout

    assert [json.loads(line)["event"] for line in written.splitlines()] == ["shown"]


def test_lone_surrogate_is_escaped() -> None:
    written = run(r"log.info('odd', value='\udc80')").stdout

    assert json.loads(written)["value"] == "\udc80"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_line_that_cannot_be_written_does_not_stop_the_work(log_format: str) -> None:
    finished = run(
        "sys.stdout = open('/dev/full', 'w')\nlog.error('lost')\nos.write(2, b'went on')\nos._exit(0)",
        log_format=log_format,
    )

    assert "could not be written: OSError" in finished.stderr
    assert finished.stderr.endswith("went on")
