"""What the pages promise: each promise has its test, and each bound is the constant of the code."""

import re
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from deploy.local.machine.folders import CHECKOUT
from tests.benchmarks import costs
from tests.deploy.pages import headings

TESTS = Path(__file__).parent
PAGES = ["README.md", "service/README.md", "worker/README.md"]
PAGES += [f"deploy/{name}.md" for name in ("README", "operate", "reference", "runbook")]
TABLE = (TESTS / "README.md").read_text().partition("\n## Promises\n")[2].partition("\n## ")[0]
PROMISES = re.findall(r"^\| \[(.+)\]\(\.\./(\S+)#(\S+)\) \| (.+) \|$", TABLE, re.MULTILINE)
# These sections of README.md explain, or say what is not promised.
EXPLANATIONS = ("can-still-happen", "decisions", "glossary", "where-everything-else-is")
KIB, MIB = 1024, 1024**2


def test_every_test_in_the_table_exists():
    rows = [line for line in TABLE.splitlines() if line.startswith("| [")]
    named = {test for *_, tests in PROMISES for test in re.findall(r"`(\S+\.py\S*)`", tests)}

    assert len(PROMISES) == len(rows) > 0
    assert {test for test in named if not exists(*test.split("::"))} == set()


def exists(module: str, name: str = r"test_\w+") -> bool:
    """Whether a module has a test of this name, or any test."""
    path = TESTS / module
    return path.is_file() and bool(re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE))


def test_every_section_and_every_guarantee_is_in_the_table():
    every = {(page, section) for page in PAGES for section in headings(CHECKOUT / page, levels="2")}
    guaranteed = (CHECKOUT / "README.md").read_text().partition("\n## Guaranteed\n")[2].partition("\n## ")[0]
    guarantees = {text.rstrip(".") for text in re.findall(r"^- \*\*(.+?)\*\*", guaranteed, re.MULTILINE)}

    assert every - {(page, section) for _, page, section, _ in PROMISES} == {
        ("README.md", section) for section in EXPLANATIONS
    }
    assert guarantees <= {promise for promise, *_ in PROMISES}


@pytest.mark.parametrize(
    ("text", "constant", "value"),
    [
        ("at most 8 KiB long", "service.authentication.access_tokens:_LARGEST_TOKEN", 8 * KIB),
        ("at most 16 KiB and", "service.calculation_requests.field_docs:META_DATA_BYTES", 16 * KIB),
        ("and 16 levels", "service.calculation_requests.field_docs:META_DATA_DEPTH", 16),
        ("object of at most 256 KiB", "service.server.limits:LARGEST_BODY", 256 * KIB),
        ("at most 50 are listed", "service.api.decoding:UNKNOWN_FIELDS_NAMED", 50),
        ("by the first 255 characters", "service.text_rules:CHARACTERS", 255),
        ("at most two fifths of", "service.settings:KEY_WAIT_SHARE", 0.4),
        ("`limit` is 1 to 100", "service.api.listing:LARGEST_LIMIT", 100),
        ("by default 20", "service.api.listing:DEFAULT_LIMIT", 20),
        ("`limit` is 1 to 500", "service.api.controllers.events:LARGEST_LIMIT", 500),
        ("by default 100", "service.api.controllers.events:DEFAULT_LIMIT", 100),
        ("holds at most 1 MiB", "service.calculation_requests.reading:LARGEST_PAGE", MIB),
        ("At most 32 times", "service.postgres.pool:_QUEUE_PER_CONNECTION", 32),
        ("at most half of these places", "service.postgres.pool:_LARGEST_SHARE", 0.5),
        ("has waited for half of", "service.settings:QUEUE_SHARE", 0.5),
        ("during the first quarter", "service.settings:JOIN_SHARE", 0.75),
        ("a quarter of a second", "service.postgres.pool:_RECONNECT_PAUSE_SECONDS", 0.25),
        ("fetched in the last 10 s", "service.authentication.signing_keys:_FRESH_SECONDS", 10),
        ("at most once a second", "service.authentication.signing_keys:_INTERVAL_SECONDS", 1),
        ("5 minutes before it signs", "service.authentication.signing_keys:_REFRESH_SECONDS", 300),
        ("of all callers together | 800 |", "service.server.limits:MOST_CONNECTIONS", 800),
        ("It has 50 connections", "service.server.limits:MOST_PROBE_CONNECTIONS", 50),
        ("| 64 KiB, 100 headers", "service.server.limits:LARGEST_HEAD", 64 * KIB),
        ("| path | 1 KiB |", "service.server.limits:LONGEST_PATH", KIB),
        ("256 KiB, 30 seconds |", "service.server.limits:BODY_SECONDS", 30),
        ("For a fifth of `SHUTDOWN_SECONDS`", "service.commands.serve:_DRAIN_SHARE", 0.2),
        ("wait five seconds for a lock", "service.command_line.connecting:LOCK_SECONDS", 5),
        ("at most a second between attempts", "worker.waiting:_LONGEST_SECONDS", 1),
        ("retried after 1 s", "worker.relay.loop:_RETRY_SECONDS", 1),
        ("after 21 deliveries", "worker.rabbitmq.topology:_DELIVERY_LIMIT", 20),
        ("headers of more than 16 KiB", "worker.rabbitmq.message_properties:_LONGEST_BYTES", 16 * KIB),
        ("messages in flight for half of", "worker.consumers.consumer:_FINISH_SHARE", 0.5),
        ("removes each dead letter after 30 days", "worker.rabbitmq.topology:_DEAD_LETTER_DAYS", 30),
        ("200 per second, without", "worker.commands.outbox:EVENTS_PER_SECOND", 200),
        ("ten times as long for the reply", "worker.mail.smtp:_CONTENT_PATIENCE", 10),
        ("awaited for nine tenths of", "worker.mail.postman:_STOPPING_SHARE", 0.9),
        ("up to a minute if it refuses us", "worker.mail.postman:_LONGEST_PAUSE_AFTER_REFUSAL_SECONDS", 60),
        ("traces get 2 s", "service.telemetry.tracing:FLUSH_SECONDS", 2),
        ("each is tried, up to 20", "service.authentication.signing_keys:_MOST", 20),
        ("(at most 1 MiB)", "service.authentication.signing_keys:_LARGEST_DOCUMENT", MIB),
        ("keep them for longer than 200 s", "service.postgres.pool:_LONGEST_IDLE_SECONDS", 200),
        ("fetched every 5 minutes", "service.authentication.signing_keys:_REFRESH_SECONDS", 300),
        ("is trusted for 5 minutes", "service.authentication.authenticator:_LONGEST_CACHED_SECONDS", 300),
        ("that it was publishing are released after 3 s", "service.postgres.connections:SILENCE_SECONDS", 3),
        ("4 s after twice this timeout", "worker.relay.loop:_SPARE_SECONDS", 4),
        ("restores the binding within a minute", "worker.rabbitmq.connection:_DECLARE_SECONDS", 60),
        ("twice as many e-mails in flight", "worker.mail.postman:_EMAILS_PER_CONNECTION", 2),
        ("about every hour", "worker.retention:_REST_SECONDS", 3600),
        ("restarts after a second", "service.server.background:_PAUSE_SECONDS", 1),
        ("every five minutes; role relay", "worker.reconciliation:INTERVAL_SECONDS", 300),
        ("waiting, at most 10,000 are examined", "worker.metrics:COUNT_LIMIT", 10_000),
        ("looks for eight seconds at each server", "service.command_line.diagnosis:CHECK_SECONDS", 8),
        ("the next is tried, up to 20", "service.addresses:_MOST_ATTEMPTS", 20),
        ("and for 20 of one request", "service.calculation_requests.email_changes:_MOST_REQUESTED", 20),
        ("200 messages at most", "worker.mail.mailbox:_MOST_AT_ONCE", 200),
        ("in the first 256 KiB", "worker.mail.reports:LARGEST_BYTES", 256 * KIB),
        ("A message has at most 16 KiB", "worker.consumers.incoming:LARGEST_BODY", 16 * KIB),
        ("share one queue: 5,000 repeats", "tests.faults.catalogue.floods:_REPEATS", 5_000),
        ("less than 200 MB and still", "tests.end_to_end.test_load:_LARGEST_MEGABYTES", 200),
        ("at most 40 ms for a request", "tests.end_to_end.test_load:STATEMENT_SECONDS", 0.04),
    ],
)
def test_figure_on_a_page_is_that_of_the_code(text, constant, value):
    pages = " ".join(" ".join((CHECKOUT / page).read_text() for page in PAGES).split())

    assert text in pages
    assert resolve_name(constant) == value


def test_figures_of_coverage_and_floors_are_on_the_page_of_the_tests():
    page = " ".join((TESTS / "README.md").read_text().split())
    coverage = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["coverage"]["report"]

    assert f"is at least {coverage['fail_under']} %" in page
    assert f"(floor: {costs.FLOORS['list']:g})" in page
