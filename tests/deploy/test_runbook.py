"""The pages for operators name commands and SQL that can be run, and every alert."""

import re

import click
import pytest

import service.__main__
import worker.__main__
from tests.deploy.alerts import ALERTS
from tests.deploy.pages import RUNBOOK, alert_entries, anchors

TEXT = "\n".join(page.read_text() for page in sorted(RUNBOOK.parent.glob("*.md")))
# Inline, or a line of a shell block. `…` stands for any command.
COMMANDS = sorted(
    set(re.findall(r"(?:python -m|operate) ((?:service|worker) [^`\n…]+)(?:`|$)", TEXT, re.MULTILINE))
)
# Inline, or in a block.
STATEMENTS = re.findall(r"(?:`|```sql\n)((?:SELECT|ANALYZE) [^`]+)`", TEXT)
PROGRAMS = {"service": service.__main__.PROGRAM, "worker": worker.__main__.PROGRAM}
# Words in capitals are for the reader to fill in.
EXAMPLES = {
    "UUID": "req_0000000000000000000000",
    "TIME": "2026-01-31T09:30:00Z",
    "QUEUE": "notifications",
    "ADDRESS": "ada@example.com",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_can_be_run(command):
    process, *words = [EXAMPLES.get(word, word) for word in command.split()]

    program: click.Command = PROGRAMS[process]
    while isinstance(program, click.Group):
        program = program.commands[words.pop(0)]
    program.make_context(program.name, words)


async def test_statements_can_be_run(database):
    assert len(STATEMENTS) > 5
    for statement in STATEMENTS:
        await database.execute(statement)


def test_page_says_of_every_alert_what_it_means_what_to_do_and_whom_to_call():
    entries = alert_entries()

    assert entries.keys() == ALERTS.keys()
    assert {name.lower() for name in entries} <= anchors(RUNBOOK)


def test_page_gives_a_reason_for_each_alert_that_wakes_a_person_and_for_no_other():
    critical = [name for name, rule in ALERTS.items() if rule["labels"]["severity"] == "critical"]

    assert re.findall(r"^\| \[(\w+)\]\(#\w+\) \| \w", TEXT, re.MULTILINE) == critical


@pytest.mark.parametrize(
    ("words", "alert", "limit"),
    [
        ("over 1 % of the calls get 500", "ApiErrorRate", "> 0.01"),
        ("takes over half a second", "ApiSlow", "> 0.5"),
        ("not been fetched for half an hour", "JwksStale", "> 1800"),
        ("for five minutes, the oldest pending event", "OutboxNotDraining", "for: 5m"),
        ("more than a minute old", "OutboxNotDraining", "> 60"),
        ("dead letters for 20 days", "DeadLettersExpiring", "for: 20d"),
        ("a tenth of the last hour's e-mails failed", "EmailsFailing", "> 0.1"),
        ("a tenth of the last hour's e-mails were accepted", "EmailsBouncing", "> 0.1"),
        ("read the mailbox for 15 minutes", "BouncesNotRead", "> 900"),
        ("hold a replica, for 90 minutes", "QueueMemberMissing", "for: 90m"),
    ],
)
def test_limit_of_an_alert_is_that_of_its_rule(words, alert, limit):
    assert words in " ".join(RUNBOOK.read_text().split())
    assert limit in f"{ALERTS[alert]['expr']} for: {ALERTS[alert].get('for')}"
