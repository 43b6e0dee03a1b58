"""The commands of operators: their settings, their arguments, their output for people and for scripts."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import click
import pytest

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from service.calculation_requests.model import RequestNotFound
from service.settings import InvalidSetting
from tests.harness.command_line import run
from tests.harness.examples import CONVEYANCER
from tests.harness.processes import Ended, bare_environment
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import command
from tests.worker.commands.steps import intend
from tests.worker.conftest import settings_with, store

UNKNOWN = "req_0000000000000000000000"
REDRIVE = ("dead-letters", "redrive", "notifications")
ON_POSTGRES = [
    ("outbox", "list"),
    ("outbox", "replay", "--from", "2026-01-01"),
    ("emails", "list"),
    ("emails", "resend", "--code", "550"),
    ("emails", "cancel", "--conveyancer", "firm"),
    ("trace", UNKNOWN),
    ("reconcile",),
]


def assert_one_clear_line(ended: Ended, part: str) -> None:
    """Check that a command failed with one line on stderr that contains *part*."""
    assert (ended.status, ended.output) == (1, "")
    assert len(ended.errors.splitlines()) == 1
    assert part in ended.errors


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        *((words, "database_url") for words in (*ON_POSTGRES, REDRIVE)),
        *((words, "amqp_url") for words in (("dead-letters", "list"), REDRIVE)),
    ],
    ids=str,
)
async def test_missing_setting_is_named(worker_settings, words, missing):
    with pytest.raises(InvalidSetting, match=f"`{missing.upper()}`"):
        await command(settings_with(worker_settings, **{missing: ""}), *words)


@pytest.mark.parametrize("words", [("outbox", "list"), ("dead-letters", "list")], ids=" ".join)
@pytest.mark.parametrize(
    ("address", "part"),
    [
        (f"zqmark:zqmark@127.0.0.1:{free_port()}/none", "reach"),
        ("127.0.0.1:zqmark/", "_URL: "),
        ("user:zqmark/1@127.0.0.1/", "_URL: "),
    ],
    ids=["nobody answers", "no port", "unescaped password"],
)
async def test_server_that_cannot_be_used_is_one_line_without_its_password(words, address, part):
    urls = bare_environment(DATABASE_URL=f"postgresql://{address}", AMQP_URL=f"amqp://{address}")

    ended = await run("worker", *words, environment=urls)

    assert_one_clear_line(ended, part)
    assert "zqmark" not in ended.errors


@pytest.mark.parametrize("words", [("trace", UNKNOWN), ("outbox", "replay", "--uuid", UNKNOWN)], ids=" ".join)
async def test_request_that_does_not_exist_is_named(worker_settings, words):
    with pytest.raises(RequestNotFound):
        await command(worker_settings, *words)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("outbox replay", "say which events to replay"),
        ("emails resend --dry-run", "say which e-mails"),
        ("emails cancel", "say which e-mails"),
        ("emails cancel --to 2026-01-01", "say which e-mails"),
        ("emails resend --sent --from 2026-01-01", "--sent needs --uuid"),
        ("emails resend --code 250", "250 is not in the range"),
        ("dead-letters list elsewhere", "'elsewhere' is not one of"),
        ("trace req_short", "is not the uuid of a request"),
    ],
)
async def test_wrong_argument_is_explained(worker_settings, words, part):
    with pytest.raises(click.UsageError, match=part):
        await command(worker_settings, *words.split())


async def test_output_is_a_table_or_json(database_url, stored_request):
    environment = bare_environment(DATABASE_URL=database_url)

    people = await run("worker", "outbox", "list", environment=environment)
    scripts = await run("worker", "outbox", "list", "--json", environment=environment)

    _, count, _, headings, row = people.output.splitlines()
    assert count.split()[:3] == ["pending", "request.created", "1"]
    assert headings.split()[0] == "event_id"
    assert row.split()[:4] == [f"{stored_request.uuid}.request.created.1", "request.created", "1", "pending"]
    [event] = json.loads(scripts.output)["events"]
    assert event["event_id"] == f"{stored_request.uuid}.request.created.1"
    assert (people.status, people.errors, scripts.status, scripts.errors) == (0, "", 0, "")


@pytest.mark.parametrize(
    ("program", "words", "reads"),
    [
        *(("worker", words, True) for words in ("outbox list", "emails list", "reconcile")),
        *(
            ("service", words, True)
            for words in ("conveyancer list", "api-key list", "request find --case-ref x")
        ),
        *(("worker", f"emails {verb} --from 2026-01-01", False) for verb in ("resend", "cancel")),
        ("worker", "outbox replay --from 2026-01-01", False),
        *(("service", f"api-key {verb} {CONVEYANCER}", False) for verb in ("create", "revoke")),
        *(("service", f"conveyancer {verb} {CONVEYANCER}", False) for verb in ("disable", "add --name Acme")),
        ("service", f"request erase {UNKNOWN}", False),
    ],
)
async def test_standby_answers_commands_that_read_and_refuses_the_others_in_a_line(
    database_url, database, stored_request, program, words, reads
):
    await intend(database, stored_request)
    await database.execute("UPDATE email SET state = 'failed', reason = 'refused', settled_at = now()")
    await store(database)
    standby = bare_environment(DATABASE_URL=f"{database_url}?default_transaction_read_only=on")

    ended = await run(program, *words.split(), environment=standby)

    assert bool(ended.output) is reads
    assert ended.errors == ("" if reads else "Postgres at DATABASE_URL takes no writes: is it a standby?\n")


@pytest.fixture
def interruptible():
    """Enable SIGINT in the processes a test starts: shells disable it in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
async def test_replay_shows_its_progress_on_a_terminal_and_keeps_its_work_when_it_is_interrupted(
    database_url, database
):
    for _ in range(5):
        await store(database)
    await database.execute("DELETE FROM outbox")
    terminal, theirs = os.openpty()

    replaying = subprocess.Popen(  # noqa: ASYNC220 - starting it does not block
        [sys.executable, "-m", *["worker", "outbox", "replay", "--from", "2020-01-01", "--rate", "1"]],
        cwd=CHECKOUT,
        env=bare_environment(DATABASE_URL=database_url),
        stderr=theirs,
        text=True,
    )
    await eventually(lambda: database.fetchval("SELECT count(*) FROM outbox"))
    replaying.send_signal(signal.SIGINT)
    status = await asyncio.to_thread(replaying.wait, timeout=20)
    os.close(theirs)
    shown = os.read(terminal, 10_000).decode()
    os.close(terminal)

    assert status == 1
    assert "replaying" in shown
    assert "/5" in shown
    assert shown.splitlines()[-1].startswith("Interrupted.")
    assert 1 <= await database.fetchval("SELECT count(*) FROM outbox") < 5


@pytest.mark.parametrize("words", [(), *ON_POSTGRES, REDRIVE, ("doctor",), ("relay",)], ids=" ".join)
async def test_every_command_has_help_that_needs_no_settings(words):
    ended = await run("worker", *words[:2], "--help", environment=bare_environment())

    assert (ended.status, ended.errors) == (0, "")
    assert ended.output.startswith(" ".join(("Usage: python -m worker", *words[:1])))
