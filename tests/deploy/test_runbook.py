"""The pages for operators name commands that exist, every alert, and behaviour that a test shows."""

import re

import click
import pytest

import service.__main__
import worker.__main__
from deploy.local.machine.folders import CHECKOUT
from tests.deploy.alerts import ALERTS
from tests.deploy.pages import RUNBOOK

TEXT = "\n".join(page.read_text() for page in sorted(RUNBOOK.parent.glob("*.md")))
# Inline, or a line of a shell block. `…` stands for any command.
COMMANDS = sorted(
    set(re.findall(r"(?:python -m|operate) ((?:service|worker) [^`\n…]+)(?:`|$)", TEXT, re.MULTILINE))
)
# Inline, or in a block.
STATEMENTS = re.findall(r"(?:`|```sql\n)((?:SELECT|ANALYZE) [^`]+)`", TEXT)
PROGRAMS = {"service": service.__main__.PROGRAM, "worker": worker.__main__.PROGRAM}
PARTS = ["Means", "Users notice", "Do", "Escalate"]
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


def test_every_section_on_an_alert_says_what_it_means_and_what_to_do():
    alerts = RUNBOOK.read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    sections = dict(section.split("\n", 1) for section in alerts.split("\n### ")[1:])

    assert list(sections) == list(ALERTS)
    for section in sections.values():
        assert re.findall(r"^- ([\w ]+):", section, re.MULTILINE) == PARTS


def test_page_gives_a_reason_for_each_alert_that_wakes_a_person_and_for_no_other():
    critical = [name for name, rule in ALERTS.items() if rule["labels"]["severity"] == "critical"]

    assert re.findall(r"^\| \[(\w+)\]\(#\w+\) \| \w", TEXT, re.MULTILINE) == critical


# What an entry says, and the part of the rule that means the same.
_LIMITS = {
    "ApiBudgetBurning": {"over 1.44 %": "> 14.4 * 0.001", "over 0.6 %": "> 6 * 0.001"},
    "ApiBudgetBurningSlowly": {"over 0.1 %": "> 0.001"},
    "EmailBudgetBurning": {"over 7.2 %": "> 14.4 * 0.005", "over 3 %": "> 6 * 0.005"},
    "EmailBudgetBurningSlowly": {"over 0.5 %": "> 0.005"},
    "ApiErrorRate": {"over 1 %": "> 0.01"},
    "ApiSlow": {"over half a second": "> 0.5"},
    "JwksStale": {"for half an hour": "> 1800"},
    "OutboxNotDraining": {"for five minutes": "for: 5m", "more than a minute old": "> 60"},
    "FeedHeldBack": {"over five minutes old": "> 300"},
    "DeadLettersExpiring": {"for 20 days": "for: 20d"},
    "EmailsNotSent": {"in eight minutes": "[8m]", "over ten more": "> 10"},
    "EmailsFailing": {"over a tenth": "> 0.1"},
    "EmailsBouncing": {"over four e-mails": "> 4", "over a tenth": "> 0.1"},
    "BouncesNotRead": {"for 15 minutes": "> 900"},
    "QueueMemberMissing": {"for 90 minutes": "for: 90m"},
    "QueueGrowing": {"for an hour": "for: 1h", "over a thousand": "> 1000"},
}


@pytest.mark.parametrize("alert", _LIMITS)
def test_limit_of_an_alert_is_that_of_its_rule(alert):
    rule = f"{ALERTS[alert]['expr']} for: {ALERTS[alert].get('for')}"
    meaning = RUNBOOK.read_text().partition(f"\n### {alert}\n")[2].partition("\n- Users notice")[0]

    for words, limit in _LIMITS[alert].items():
        assert words in " ".join(meaning.split())
        assert limit in rule


def test_tests_that_are_named_exist():
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    written = {
        name
        for file in (CHECKOUT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }

    assert named
    assert named <= written
