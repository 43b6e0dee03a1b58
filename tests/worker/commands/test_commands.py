"""The commands of both programs: their help, their errors, and their interruption."""

import json
import shlex
import signal
import socket

import pytest

from deploy.local.machine.ports import free_port
from tests.harness.examples import CONVEYANCER
from tests.harness.in_process import call, run
from tests.harness.processes import Process, bare_environment, python, started
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import COMMANDS
from tests.worker.steps import intend, store_many

UNKNOWN = "req_0000000000000000000000"
NO_UTF_8 = "\udcff"
STANDBY = "{DATABASE_URL}?default_transaction_read_only=on"
NOBODY = f"zqmark:zqmark@127.0.0.1:{free_port()}/none"
TAKING_TEXT = (
    *("conveyancer disable", "conveyancer enable", "api-key create", "api-key revoke"),
    *("request find --external-id", "request find --customer-email", "request find --case-ref"),
)
LIST = "worker outbox list"
DEAD = "worker dead-letters list"


@pytest.fixture
def environment(environment):
    """The settings of both processes, and a port in use. Nothing here gets as far as a broker."""
    of_worker = {
        "AMQP_URL": "amqp://127.0.0.1/",
        "SMTP_URL": "smtp://127.0.0.1",
        "MAIL_FROM": "a@example.com",
    }
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield environment | of_worker | {"TAKEN": str(listening.getsockname()[1])}


@pytest.mark.parametrize("words", [("worker",), ("service",), *COMMANDS], ids=" ".join)
def test_every_command_has_help_that_needs_no_settings(words):
    ended = call(*words, "--help", environment=bare_environment())

    assert (ended.status, ended.errors) == (0, "")
    assert ended.output.startswith(f"Usage: python -m {' '.join(words)} ")


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("worker nonsense", "'nonsense'"),
        ("worker outbox replay", "say which events to replay"),
        ("worker emails resend", "say which e-mails"),
        ("worker emails resend --sent --from 2026-01-01", "--sent needs --uuid"),
        ("worker dead-letters list elsewhere", "'elsewhere' is not one of"),
        ("worker dead-letters discard notifications", "say which dead letters"),
        ("service conveyancer usage --month 2026", "does not match the format"),
        ("service request find", "Say what to find"),
        (f"service request correct {UNKNOWN} --customer-email a@b@example.com", "Expected one address"),
        ("service conveyancer add new-firm\u202e --name 'New Firm'", "Invalid value for 'ID'"),
        (f"service conveyancer disable {CONVEYANCER} --note {NO_UTF_8}", "Invalid value for '--note'"),
        *((f"service {words} {NO_UTF_8}", "Invalid value for") for words in TAKING_TEXT),
    ],
    ids=ascii,
)
def test_wrong_argument_is_explained_before_anything_is_done(command, part):
    ended = call(*shlex.split(command), environment=bare_environment())

    assert (ended.status, ended.output) == (2, "")
    assert part in ended.errors


@pytest.mark.parametrize(
    ("command", "changes", "part"),
    [
        (LIST, {"DATABASE_URL": ""}, "missing environment variable DATABASE_URL"),
        (DEAD, {"AMQP_URL": ""}, "missing environment variable AMQP_URL"),
        (LIST, {"DATABASE_URL": f"postgresql://{NOBODY}"}, "Postgres at DATABASE_URL is unavailable: "),
        (DEAD, {"AMQP_URL": f"amqp://{NOBODY}"}, "RabbitMQ at AMQP_URL is unavailable: "),
        (LIST, {"DATABASE_URL": "postgresql://127.0.0.1:zqmark/"}, "DATABASE_URL: "),
        (DEAD, {"AMQP_URL": "amqp://127.0.0.1:zqmark/"}, "AMQP_URL: "),
        (LIST, {"DATABASE_URL": "{DATABASE_URL}?sslmode=zqmark"}, "DATABASE_URL: not the address of a"),
        (LIST, {"DATABASE_URL": "{DATABASE_URL}?search_path=none"}, "older than this release needs"),
        (f"worker outbox replay --uuid {UNKNOWN}", {}, "There is no such request."),
        (f"service request erase {UNKNOWN}", {}, f"{UNKNOWN}: no such request"),
        ("service conveyancer disable nobody", {}, "No conveyancer is registered under this identifier"),
        ("service api-key revoke 000000000000", {}, "No valid API key has this prefix"),
        (f"service api-key create {CONVEYANCER}", {"DATABASE_URL": STANDBY}, "is it a standby?"),
        ("service serve", {"REQUEST_SECRET_KEYS": "zqmark:tooshort"}, "REQUEST_SECRET_KEYS"),
        ("service serve", {"HOST": "none.invalid"}, "cannot listen on none.invalid"),
        ("service serve", {"PORT": "{TAKEN}"}, "{TAKEN}"),
        ("service serve", {"PORT": "80", "HEALTH_PORT": "80"}, "PORT and HEALTH_PORT are both 80: "),
        ("worker", {"HEALTH_PORT": "{TAKEN}"}, "{TAKEN}"),
        ("worker doctor", {"MAIL_FROM": "zqmark:tooshort"}, "MAIL_FROM: "),
    ],
)
def test_failure_is_one_line_with_its_cause_and_no_value_of_a_setting(environment, command, changes, part):
    ports = {"PORT": str(free_port()), "HEALTH_PORT": str(free_port())}
    changed = {name: value.format(**environment) for name, value in changes.items()}

    ended = call(*command.split(), environment=environment | ports | changed)

    said = ended.output + ended.errors
    assert (ended.status, len(said.splitlines()), "zqmark" in said) == (1, 1, False), ended
    assert part.format(**environment) in said


async def test_standby_is_enough_for_commands_that_only_read(database_url, database, stored_request):
    await intend(database, stored_request)
    standby = bare_environment(DATABASE_URL=STANDBY.format(DATABASE_URL=database_url))

    for command in (
        *("worker outbox list", "worker emails list", "worker reconcile"),
        *("service conveyancer list", "service api-key list", "service request find --case-ref x"),
    ):
        ended = await run(*command.split(), "--json", environment=standby)
        assert (ended.status, ended.errors) == (0, ""), command
        json.loads(ended.output)


@pytest.mark.parametrize(
    ("number", "status", "last"), [(signal.SIGINT, 1, "Interrupted."), (signal.SIGTERM, 143, '{"action":')]
)
async def test_interrupted_replay_keeps_its_work(*, database_url, database, tmp_path, number, status, last):
    await store_many(database, 500)
    words = python("worker", "outbox", "replay", "--from", "2020-01-01")
    environment = bare_environment(DATABASE_URL=database_url)
    replay = Process("replay", words, environment=environment, port=0, folder=tmp_path)

    async with started(replay, ready=False):
        await eventually(lambda: database.fetchval("SELECT count(*) FROM outbox"))
        replay.running.send_signal(number)
        ended = await replay.exit_status()

    assert ended == status
    assert replay.output.splitlines()[-1].startswith(last)
    assert 100 <= await database.fetchval("SELECT count(*) FROM outbox") < 500


@pytest.mark.parametrize("command", ["service serve", "service schema apply", "worker", "worker doctor"])
async def test_sigterm_ends_every_command_while_it_starts(environment, tmp_path, command):
    """Also as PID 1, which ignores signals without a handler, as this process lets its child do."""
    words = python(*command.split())
    process = Process("command", words, environment=environment, port=0, folder=tmp_path)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    async with started(process, ready=False):
        signal.signal(signal.SIGTERM, before)
        await eventually(lambda: not process.ignores(signal.SIGTERM), seconds=10)
        status = await process.stop()

    assert (status, process.output) == (128 + signal.SIGTERM, "")
