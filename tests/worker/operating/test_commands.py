"""The operator commands as processes: their output, for people and for scripts, and their errors."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from service.calculation_requests.model import CalculationRequest
from service.identifiers import uuid_of
from service.postgres.pool import Connection
from service.settings import InvalidSetting
from tests.harness.command_line import run
from tests.harness.processes import Ended, bare_environment
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with, store
from worker.operating import arguments, commands
from worker.operating.answers import Answer, cell, printable, table
from worker.settings import WorkerSettings

EVERY_DATABASE_COMMAND = [
    ("outbox", "list"),
    ("outbox", "replay", "--from", "2026-01-01"),
    ("emails", "list"),
    ("emails", "retry", "--code", "450"),
    ("emails", "resend", "--code", "550"),
    ("trace", "req_0000000000000000000000"),
    ("reconcile",),
]
EVERY_BROKER_COMMAND = [
    ("dead-letters", "list"),
    ("dead-letters", "show", "notifications", "an-id"),
]
REDRIVE = ("dead-letters", "redrive", "notifications")


async def command(settings: WorkerSettings, *words: str, **limits: object) -> Answer:
    """Run an operator command in this process, on the servers of *settings*.

    The *limits* are options that the command line does not offer.
    """
    environment = {"DATABASE_URL": settings.database_url, "AMQP_URL": settings.amqp_url}
    options = commands.parser().parse_args(words)
    assert vars(options).keys() >= limits.keys()
    vars(options).update(limits)
    return await commands.execute(options, environment)


def assert_one_clear_line(ended: Ended, part: str) -> None:
    """Check that a command failed with one line on stderr that contains *part*."""
    assert ended.status == 1
    assert ended.output == ""
    assert len(ended.errors.splitlines()) == 1
    assert part in ended.errors
    assert "Traceback" not in ended.errors


@pytest.mark.parametrize("words", EVERY_DATABASE_COMMAND, ids=" ".join)
async def test_commands_on_the_database_need_its_url_alone(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidSetting, match="`DATABASE_URL`"):
        await commands.execute(commands.parser().parse_args(words), {"AMQP_URL": "amqp://127.0.0.1"})


@pytest.mark.parametrize("words", EVERY_BROKER_COMMAND, ids=" ".join)
async def test_commands_on_the_broker_need_its_url_alone(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidSetting, match="`AMQP_URL`"):
        await commands.execute(
            commands.parser().parse_args(words), {"DATABASE_URL": "postgresql://127.0.0.1"}
        )


async def test_redriving_needs_both_urls(worker_settings: WorkerSettings) -> None:
    for missing in ("database_url", "amqp_url"):
        with pytest.raises(InvalidSetting, match=missing.upper()):
            await command(settings_with(worker_settings, **{missing: ""}), *REDRIVE)


async def test_missing_setting_is_reported_in_one_line() -> None:
    ended = await run("worker", "outbox", "list", environment=bare_environment())

    assert_one_clear_line(ended, "DATABASE_URL")


@pytest.mark.parametrize("rest", ["127.0.0.1:zqmark/", "user:zqmark/1@127.0.0.1/"])
async def test_malformed_address_is_named_but_not_shown(rest: str) -> None:
    environment = {"DATABASE_URL": f"postgresql://{rest}", "AMQP_URL": f"amqp://{rest}"}

    for words in (("outbox", "list"), ("dead-letters", "list")):
        with pytest.raises(InvalidSetting, match=r"\A(DATABASE|AMQP)_URL: ") as refusal:
            await commands.execute(commands.parser().parse_args(words), environment)
        assert "zqmark" not in str(refusal.value)


async def test_unreachable_server_is_reported_in_one_line() -> None:
    port = free_port()
    environment = bare_environment(
        DATABASE_URL=f"postgresql://postgres:hidden@127.0.0.1:{port}/x",
        AMQP_URL=f"amqp://guest:hidden@127.0.0.1:{port}/",
    )

    database = await run("worker", "outbox", "list", environment=environment)
    broker = await run("worker", "dead-letters", "list", environment=environment)

    assert_one_clear_line(database, "Postgres at DATABASE_URL is unreachable")
    assert_one_clear_line(broker, "RabbitMQ cannot be reached")
    assert "hidden" not in database.errors + broker.errors


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("trace", "req_short"), "'req_short' is not the uuid of a request"),
        (("trace", unknown_uuid := "req_0000000000000000000000"), "There is no such request"),
        (("outbox", "replay", "--uuid", unknown_uuid), "There is no such request"),
        (("outbox", "replay"), "--from"),
        (("outbox", "replay", "--from", "yesterday"), "'yesterday' is not a time"),
        (("outbox", "replay", "--from", "0001-01-01"), "too long ago"),
        (("emails", "list", "--to", "9999-12-31T23:59:59Z"), "too far away"),
        (("emails", "resend", "--code", "550", "--reason", "not UTF-8: \udcff"), "--reason: say why"),
        (("outbox", "replay", "--from", "2026-01-01", "--type", "x"), "'x' is not one of request.created"),
        (("outbox", "replay", "--from", "2026-01-01", "--rate", "0"), "'0' is not a number from 0.1"),
        (("outbox", "replay", "--from", "2026-01-01", "--rate", "many"), "'many' is not a number from 0.1"),
        (("outbox", "list", "--limit", "0"), "'0' is not a number from 1 to 10000"),
        (("dead-letters", "list", "elsewhere\x1b[2J"), "elsewhere\\x1b[2J: no such queue"),
        (("dead-letters", "show", "notifications"), "--position"),
        (("dead-letters", "show", "notifications", "an-id"), "no such message among the first 0"),
    ],
    ids=str,
)
async def test_invalid_argument_is_rejected(
    worker_settings: WorkerSettings, words: tuple[str, ...], part: str
) -> None:
    with pytest.raises(commands.EXPECTED) as refusal:
        await command(worker_settings, *words)

    assert part in (str(refusal.value) or str(refusal.value.__doc__))


async def test_invalid_argument_is_reported_in_one_line() -> None:
    ended = await run("worker", "trace", "req_short\x1b[2J", environment=bare_environment())

    assert_one_clear_line(ended, "is not the uuid of a request")
    assert ended.errors.isascii()
    assert "\x1b" not in ended.errors


async def test_outdated_schema_is_reported_in_one_line(database_url: str, database: Connection) -> None:
    await database.execute("DELETE FROM schema_version")

    ended = await run("worker", "outbox", "list", environment=bare_environment(DATABASE_URL=database_url))

    assert_one_clear_line(ended, "schema apply")


async def test_output_is_a_table_or_json(database_url: str, stored_request: CalculationRequest) -> None:
    environment = bare_environment(DATABASE_URL=database_url)

    people = await run("worker", "outbox", "list", environment=environment)
    scripts = await run("worker", "outbox", "list", "--json", environment=environment)

    _, count, _, headings, row = people.output.splitlines()
    assert count.split()[:3] == ["pending", "request.created", "1"]
    assert headings.split("  ")[0].strip() == "event id"
    assert row.split()[:3] == [f"{stored_request.uuid}.request.created.1", "pending", "0"]
    [event] = json.loads(scripts.output)["events"]
    assert event["event_id"] == f"{stored_request.uuid}.request.created.1"
    assert (people.status, people.errors, scripts.status, scripts.errors) == (0, "", 0, "")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Enable SIGINT in the processes a test starts: shells disable it in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
async def test_interrupted_replay_keeps_its_work_and_reports_that(
    database_url: str, database: Connection
) -> None:
    for _ in range(5):
        await store(database)
    await database.execute("DELETE FROM outbox")

    replaying = subprocess.Popen(  # noqa: ASYNC220 - starting it does not block
        [sys.executable, "-m", *["worker", "outbox", "replay", "--from", "2020-01-01", "--rate", "1"]],
        cwd=CHECKOUT,
        env=bare_environment(DATABASE_URL=database_url),
        stderr=subprocess.PIPE,
        text=True,
    )
    await eventually(lambda: database.fetchval("SELECT count(*) FROM outbox"))
    replaying.send_signal(signal.SIGINT)
    _, errors = await asyncio.to_thread(replaying.communicate, timeout=20)

    assert replaying.returncode == 1
    assert errors.startswith("Interrupted.")
    assert len(errors.splitlines()) == 1
    assert 1 <= await database.fetchval("SELECT count(*) FROM outbox") < 5


def test_commands_load_no_web_framework_and_nothing_for_access_tokens() -> None:
    program = """
import sys
import worker.operating.commands
print([name for name in ("litestar", "uvicorn", "httpx", "jwt", "cachetools") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"


async def test_help_needs_no_settings() -> None:
    ended = await run("worker", "outbox", "replay", "--help", environment=bare_environment())

    assert ended.status == 0
    assert ended.output.startswith("usage: python -m worker outbox replay")


@pytest.mark.parametrize(
    "words",
    [*EVERY_DATABASE_COMMAND, *EVERY_BROKER_COMMAND, REDRIVE, ("outbox",), ("dead-letters",)],
    ids=" ".join,
)
def test_every_command_has_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        commands.parser().parse_args([*words[:2], "--help"])

    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m worker")


def test_cells_cannot_manipulate_the_terminal() -> None:
    assert printable("a\x1b[31m\n\u202eb\\") == "a\\x1b[31m\\n\\u202eb\\"
    assert cell("x" * 500) == "x" * 99 + "…"


def test_numbers_are_aligned_to_the_right() -> None:
    assert table(("name", "n"), [("a", 1), ("bc", 22.25)]) == "name     n\na        1\nbc    22.2"


def test_uuid_of_an_unknown_request_is_well_formed() -> None:
    request_id = arguments.request_id(unknown_uuid)

    assert uuid_of(request_id) == unknown_uuid
