"""Log lines: their format and level, and what they leave out. Background work and traces that fail."""

import asyncio
import json
import logging
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiosmtplib import SMTPServerDisconnected
from msgspec.structs import replace
from structlog.testing import capture_logs

from service.server import background
from service.server.background import in_background
from service.settings import Settings
from service.telemetry import logs, tracing
from tests.harness.command_line import restored_logging
from tests.harness.metrics import rises
from tests.harness.waiting import eventually


@pytest.fixture
def configure():
    """Configures logging as a process does."""
    with restored_logging():
        yield partial(logs.configure, Settings(database_url=""))


def written(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the lines written since the last call."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_our_lines_and_those_of_libraries_have_one_json_format_and_one_level(configure, capsys):
    configure()
    log = structlog.get_logger()
    log.debug("hidden")
    logging.getLogger("library").debug("hidden")
    log.warning("ours", odd=1j)
    logging.getLogger("library").warning("theirs %s", 2)

    ours, theirs = written(capsys)
    assert (ours["event"], ours["odd"], ours["level"]) == ("ours", "1j", "warning")
    assert (theirs["event"], theirs["level"]) == ("theirs 2", "warning")
    assert ours.keys() - {"odd"} == theirs.keys()


def test_texts_that_libraries_quote_are_not_logged(configure, capsys):
    configure()
    logging.getLogger("httpx").info("hunter2")
    logging.getLogger("aiormq.channel").error("hunter2")
    logging.getLogger("asyncio").error("Task failed\ncontext: hunter2", exc_info=LookupError("hunter2"))

    [line] = written(capsys)
    assert (line["event"], line["level"], line["error"]) == ("Task failed", "error", "LookupError")
    assert "hunter2" not in str(line)
    ours = logs.describe(ConnectionRefusedError(111, "Connection refused"))
    theirs = logs.describe(SMTPServerDisconnected("<ada@customer.example.com>: go away"))
    assert (ours["reason"], theirs.get("reason")) == ("[Errno 111] Connection refused", None)


def test_line_that_cannot_be_written_does_not_stop_the_work(configure, monkeypatch):
    configure()
    with suppress(OSError), Path("/dev/full").open("w") as full:  # Closing it fails, too.
        monkeypatch.setattr(sys, "stdout", full)

        assert structlog.get_logger().error("lost") is None


def test_end_does_not_wait_until_the_export_to_a_silent_collector_gives_up(service_settings):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(10)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = replace(service_settings, otel_exporter_otlp_endpoint=endpoint)

        with tracing.exporting(settings, service="test"), tracing.span("a span", "client", dict):
            pass

        connection, _ = silent.accept()
        connection.settimeout(0)
        with connection, pytest.raises(BlockingIOError):  # The export has not given up.
            list(iter(partial(connection.recv, 65_536), b""))


@pytest.mark.parametrize("error", [LookupError, asyncio.CancelledError])  # aiormq cancels to close a channel
async def test_failed_work_is_logged_and_restarted_but_not_at_the_end(monkeypatch, error):
    monkeypatch.setattr(background, "_PAUSE_SECONDS", 0.01)
    begun = 0

    async def fail_twice_and_at_the_end() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise error("a secret")
        try:
            await asyncio.Event().wait()
        finally:
            raise LookupError

    with capture_logs() as lines, rises("background_failures_total", by=3, work="test"):
        async with asyncio.timeout(30), in_background("test", fail_twice_and_at_the_end):
            await eventually(lambda: begun == 3)

    names = [error.__name__, error.__name__, "LookupError"]
    failed = [("background_work_failed", "test", name) for name in names]
    assert [(line["event"], line["work"], line["error"]) for line in lines] == failed
    assert begun == 3
    assert "a secret" not in str(lines)
