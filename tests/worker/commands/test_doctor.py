"""Both doctors, on real servers, with and without problems."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aio_pika import Message
from aiosmtpd.smtp import SMTP, AuthResult
from structlog.testing import capture_logs
from yarl import URL

from deploy.local.machine.ports import free_port
from service import diagnosis
from service.calculation_requests.request_secrets import SecretKeyRing, remember_keys
from service.commands.doctor import examine_service
from service.diagnosis import Check, Finding
from service.every_firm import email_changes
from service.outbox.lanes import RelayWaker
from service.postgres.pool import Pool
from tests.harness.command_line import run
from tests.harness.fixed_answers import answering, http_answer
from tests.harness.mail_server import MailServer, ScriptedMailServer
from tests.harness.processes import environment_of
from tests.harness.queues import holds
from tests.harness.scripted_broker import ScriptedBroker
from tests.harness.waiting import eventually
from tests.worker.commands.steps import intend
from tests.worker.conftest import hold_events, settings_with, store
from worker import process
from worker.commands.doctor import examine_worker
from worker.rabbitmq import topology
from worker.settings import WorkerSettings

QUEUES = ["notifications", "calculation-results"]
CHECKS = {
    "service": ["settings", "postgres", "secret keys", "application", "signing keys"],
    "worker": [
        *("settings", "postgres", "secret keys", "events", "e-mails", "requests", "application", "rabbitmq"),
        *(f"queue {name}{kind}" for kind in ("", ".dead-letters") for name in QUEUES),
        *("rabbitmq's alarm", "mail server"),
    ],
}


@pytest.fixture
async def environment(worker_settings, service_settings):
    """The environment of processes without problems, except that their mail server has no encryption."""
    async with answering(http_answer("404 Not Found", b"")) as port:
        both = environment_of(worker_settings) | environment_of(service_settings)
        yield both | {"APP_URL": f"http://127.0.0.1:{port}"}


@pytest.fixture
async def reading(channel):
    """Consumers of both queues, as workers are."""
    for name in QUEUES:
        await (await channel.get_queue(name)).consume(_ignore)


async def _ignore(_: object) -> None:
    """Leave the message unacknowledged."""


async def found(environment: Mapping[str, str], check: str) -> Finding:
    """Return the finding of one check."""
    examine = examine_service if check in CHECKS["service"] else examine_worker
    [finding] = [finding for finding in await examine(environment) if finding.check == check]
    return finding


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("program", CHECKS)
async def test_healthy_environment_has_a_line_for_each_check(environment, program):
    ended = await run(program, "doctor", environment=environment)

    assert (ended.status, ended.errors) == (0, "")
    states = {
        check: state for state, check, *_ in (re.split(" {2,}", each) for each in ended.output.splitlines())
    }
    assert sorted(states) == sorted(CHECKS[program])
    assert [each for each in states.items() if each[1] != "ok"] == (
        [("mail server", "warning")] if program == "worker" else []
    )


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("service", ["settings wrong", "postgres wrong", "signing keys wrong", "application ok"]),
        (
            "worker",
            [
                *("settings wrong", "settings wrong", "postgres wrong", "rabbitmq wrong"),
                "mail server warning",  # not checked without MAIL_FROM
                "application ok",
            ],
        ),
    ],
)
async def test_command_says_what_is_wrong_first_and_prints_no_secret(environment, program, expected):
    nowhere = f"me:hunter2@127.0.0.1:{free_port()}"
    environment |= {
        "DATABASE_URL": f"postgresql://{nowhere}/x",
        "AUTH_JWKS_URL": f"https://{nowhere}/jwks",
        "AMQP_URL": f"amqp://{nowhere}/",
        "SMTP_URL": f"smtp://{nowhere}",
        "MAIL_FROM": "hunter2",
        "REQUEST_SECRET_KEYS": "current:hunter2",
    }

    ended = await run(program, "doctor", "--json", environment=environment)

    findings = json.loads(ended.output)
    assert [f"{finding['check']} {finding['state']}" for finding in findings] == expected
    assert (ended.status, ended.errors) == (1, "")
    assert "hunter2" not in ended.output


async def test_every_bad_variable_is_named_and_its_checks_are_skipped(environment):
    environment |= {"PORT": "eighty", "DATABASE_URL": "mysql://x", "AUTH_JWKS_URL": "", "LOG_LEVEL": "LOUD"}
    environment |= {"REQUEST_SECRET_KEYS": "x"}

    findings = await examine_service(environment)

    wrong = [finding.says for finding in findings if finding.state == "wrong"]
    named = ("AUTH_JWKS_URL", "DATABASE_URL", "LOG_LEVEL", "PORT", "REQUEST_SECRET_KEYS")
    assert len(wrong) == len(named)
    assert all(name in says for name, says in zip(named, wrong, strict=True))
    assert [(finding.check, finding.says) for finding in findings if finding.state == "warning"] == [
        ("postgres", "not checked without DATABASE_URL"),
        ("signing keys", "not checked without AUTH_JWKS_URL"),
    ]


@pytest.mark.parametrize(
    ("check", "variable", "changes", "says"),
    [
        *(
            (check, f"{name}_URL", {part: value}, says)
            for check, name in (("postgres", "DATABASE"), ("rabbitmq", "AMQP"), ("application", "APP"))
            for part, value, says in (
                ("port", 1, "connection refused"),
                ("host", "nowhere.invalid", "unknown host"),
            )
        ),
        ("postgres", "DATABASE_URL", {"path": "/no-such-database"}, "no such database"),
        ("postgres", "DATABASE_URL", {"user": "nobody-here"}, "user or password refused"),
        ("rabbitmq", "AMQP_URL", {"password": "hunter2"}, "user or password refused"),
        ("rabbitmq", "AMQP_URL", {"path": "/nowhere"}, "it closes the connection"),
        ("mail server", "SMTP_URL", {"scheme": "smtp+starttls"}, "it does not offer STARTTLS"),
    ],
)
async def test_server_that_cannot_be_used_is_found(environment, check, variable, changes, says):
    url = URL(environment[variable])
    for part, value in changes.items():
        url = getattr(url, f"with_{part}")(value)

    finding = await found(environment | {variable: str(url)}, check)

    assert finding.state == "wrong"
    assert finding.says.startswith(says)


async def test_checks_run_side_by_side():
    everyone = asyncio.Barrier(2)

    async def look() -> AsyncIterator[Finding]:
        await everyone.wait()
        yield Finding("ok", "both", "look at the same time")

    findings = await diagnosis.diagnose({}, {}, [Check(name, [], look, "") for name in ("one", "other")])

    assert [finding.state for finding in findings] == ["ok", "ok", "ok"]


async def test_no_check_waits_long_for_a_silent_server(environment, authority, monkeypatch):
    monkeypatch.setattr(diagnosis, "CHECK_SECONDS", 0.5)
    async with answering(None) as one, answering(None, authority.server_context()) as other:
        environment["DATABASE_URL"] = f"postgresql://127.0.0.1:{one}/x"
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{other}/jwks"

        findings = await examine_service(environment)

    silent = {finding.check for finding in findings if finding.says == "no answer in time"}
    assert silent >= {"postgres", "signing keys"}


async def test_watching_doctor_looks_again_and_again(monkeypatch, capsys):
    monkeypatch.setattr(diagnosis, "WATCH_SECONDS", 0.01)
    looks = iter([Finding("wrong", "postgres", "connection refused"), Finding("ok", "postgres", "is back")])

    async def examine() -> list[Finding]:
        return [next(looks)]

    with pytest.raises(RuntimeError):  # when there are no more
        await diagnosis.answer(examine, watch=True)

    assert capsys.readouterr().out.splitlines() == [
        "wrong    postgres  connection refused",
        "ok       postgres  is back",
    ]


# Postgres, and what is pending there


async def test_table_that_another_session_has_locked_is_found(environment, database):
    async with database.transaction():
        await database.execute("LOCK TABLE calculation_request IN SHARE MODE")

        finding = await found(environment, "postgres")

    assert finding.state == "wrong"
    assert finding.says.startswith("another session has locked its tables")


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM schema_version", "its schema is too old, or there is none"),
        ("DROP TABLE schema_version", "its schema is too old, or there is none"),
        ('ALTER DATABASE "{database}" SET default_transaction_read_only = on', "it takes no writes"),
        (
            "CREATE RULE full_disk AS ON INSERT TO operator_action DO INSTEAD SELECT full_disk()",
            "its disk is full",
        ),
    ],
    ids=["older schema", "no schema", "read-only", "full disk"],
)
async def test_postgres_that_cannot_be_written_to_is_found(environment, database, statement, says):
    await database.execute(
        """
        CREATE FUNCTION full_disk() RETURNS void LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION USING ERRCODE = 'disk_full';
        END $$
        """
    )
    name = await database.fetchval("SELECT current_database()")
    await database.execute(statement.format(database=name))

    finding = await found(environment, "postgres")

    assert finding.state == "wrong"
    assert finding.says.startswith(says)


async def test_doctor_leaves_no_trace(environment, database):
    await examine_service(environment)

    counts = "SELECT (SELECT count(*) FROM operator_action) + (SELECT count(*) FROM secret_key)"
    assert await database.fetchval(counts) == 0


async def test_missing_keys_and_another_one_under_the_same_id_are_found(environment, database):
    first = SecretKeyRing.parse(environment["REQUEST_SECRET_KEYS"])
    assert await remember_keys(database, first) == []
    before = await found(environment, "secret keys")
    await store(database)
    await database.execute("UPDATE calculation_request SET secret_key_id = 'newest'")
    await remember_keys(database, SecretKeyRing.parse(f"of-workers:{'B' * 43}"))
    environment["REQUEST_SECRET_KEYS"] = f"{first.current_id}:{'C' * 43},older:{'B' * 43}"

    findings = [each for each in await examine_service(environment) if each.check == "secret keys"]

    assert (before.state, before.says) == ("ok", "has every key that was in use before")
    assert [(finding.state, finding.says) for finding in findings] == [
        ("wrong", f"another key than before has the id {first.current_id}"),
        ("wrong", "stored requests need newest, which is missing"),
        ("wrong", "stored requests need of-workers, which is missing"),
    ]


async def test_events_and_emails_are_counted_by_state(environment, database):
    refused, pending, cancelled = [await store(database) for _ in range(3)]
    await hold_events(database, refused.id)
    await intend(database, pending)
    await database.execute(
        "UPDATE email SET server_reply = '450 4.2.1 <someone@example.com> later', attempts = 1"
    )
    await database.execute("UPDATE outbox_held SET attempts = 1")
    await email_changes.cancel(database, [cancelled.id])

    events, emails = await found(environment, "events"), await found(environment, "e-mails")

    assert events.state == "warning"
    assert re.search(r"3 pending, the oldest for \d+ s, 1 retrying, ", events.says)
    assert (emails.state, emails.says) == (
        "warning",
        "of the last day: 1 failed cancelled, 1 pending 450",
    )


async def test_customer_without_an_email_is_found(environment, database):
    request = await store(database)
    await database.execute("DELETE FROM outbox")
    await database.execute("UPDATE calculation_request SET created_at = now() - interval '1 hour'")

    finding = await found(environment, "request_without_email")

    assert finding.state == "wrong"
    assert finding.says.startswith("1 requests: ")
    assert finding.do is not None
    assert request.uuid in finding.do


# RabbitMQ


@pytest.mark.parametrize("marker", [b"AMQP", b"notifications"], ids=["at once", "later"])
async def test_wait_for_a_silent_broker_is_limited(environment, broker_link, monkeypatch, marker):
    monkeypatch.setattr(diagnosis, "CHECK_SECONDS", 0.5)
    environment["AMQP_URL"] = broker_link.url
    broker_link.hold_before(marker)

    async with asyncio.timeout(5):
        findings = await examine_worker(environment)

    assert ("wrong", "no answer in time") in {(finding.state, finding.says) for finding in findings}


async def test_missing_queue_is_found_and_not_created(environment, channel):
    await channel.queue_delete(topology.NOTIFICATIONS.name)

    for _ in range(2):
        finding = await found(environment, "queue notifications")
        assert (finding.state, finding.says) == ("wrong", "missing")


async def test_queue_with_other_arguments_is_found(environment, channel):
    queue = topology.CALCULATION_RESULTS
    await channel.queue_delete(queue.name)
    arguments = {**queue.arguments, "x-delivery-limit": 3}
    await channel.declare_queue(queue.name, durable=True, arguments=arguments)

    finding = await found(environment, "calculation-results")

    assert finding.state == "wrong"
    assert "x-delivery-limit" in finding.says
    await channel.queue_delete(queue.name)


async def test_messages_that_nobody_reads_and_dead_letters_are_found(environment, channel):
    live, graveyard = topology.NOTIFICATIONS.name, topology.NOTIFICATIONS.dead_letters
    for queue in (live, graveyard):
        await channel.default_exchange.publish(Message(b"message"), queue)

        await eventually(partial(holds, channel, queue, 1))

    unread, empty, dead = [await found(environment, f"queue {name}") for name in (*QUEUES, graveyard)]

    assert (unread.state, unread.says) == ("wrong", "1 messages, 0 consumers")
    assert (empty.state, empty.says) == ("warning", "0 messages, 0 consumers")
    assert (dead.state, dead.says) == ("warning", "1 messages")


async def test_alarm_is_found(environment):
    async with ScriptedBroker() as broker:
        environment["AMQP_URL"] = broker.url
        before = await found(environment, "rabbitmq's alarm")
        broker.raise_alarm()

        finding = await found(environment, "rabbitmq's alarm")

    assert (before.state, finding.state) == ("ok", "wrong")


# The mail server


@asynccontextmanager
async def secure_mail_server(context: ssl.SSLContext, **options: Any) -> AsyncIterator[str]:
    """Run a mail server that offers STARTTLS. Yields its address."""
    loop = asyncio.get_running_loop()
    handler = MailServer()
    server = await loop.create_server(
        lambda: SMTP(handler, tls_context=context, loop=loop, **options), "127.0.0.1", 0
    )
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_unencrypted_mail_server_is_a_warning(environment, mail_server):
    finding = await found(environment, "mail server")

    assert (finding.state, finding.says) == ("warning", "accepts MAIL_FROM, but without encryption")
    assert mail_server.accepted == []


@pytest.mark.parametrize(
    ("days", "state", "says"),
    [
        (100.5, "ok", "accepts MAIL_FROM, encrypted; its certificate expires in 100 days"),
        (5.5, "warning", "accepts MAIL_FROM, encrypted; its certificate expires in 5 days"),
        (-1, "wrong", "its certificate is not accepted: certificate has expired"),
    ],
    ids=["valid", "expires soon", "expired"],
)
async def test_certificate_of_the_mail_server_is_checked(environment, authority, days, state, says):
    async with secure_mail_server(authority.server_context(days=days)) as address:
        finding = await found(environment | {"SMTP_URL": f"smtp+starttls://{address}"}, "mail server")

    assert (finding.state, finding.says) == (state, says)


async def test_refused_password_is_found(environment, authority):
    def refuse(*_: object) -> AuthResult:
        return AuthResult(success=False, handled=False)

    context = authority.server_context()
    async with secure_mail_server(context, authenticator=refuse) as address:
        finding = await found(
            environment | {"SMTP_URL": f"smtp+starttls://me:hunter2@{address}"}, "mail server"
        )

    assert (finding.state, finding.says) == ("wrong", "user or password refused (535)")


@pytest.mark.parametrize(
    ("command", "answer", "says"),
    [
        ("MAIL", b"550 Not you", "MAIL_FROM refused (550)"),
        ("greeting", b"554 Not you", "it answers 554"),
        ("EHLO", b"421 Going down", "it answers 421"),
    ],
)
async def test_refusing_mail_server_is_found(environment, command, answer, says):
    async with ScriptedMailServer() as server:
        server.replies[command] = answer

        finding = await found(environment | {"SMTP_URL": server.url}, "mail server")

    assert (finding.state, finding.says) == ("wrong", says)


# The customer's application, and the issuer's keys


@pytest.mark.parametrize(
    ("check", "status", "certificate", "state", "says"),
    [
        ("application", "200 OK", None, "ok", "APP_URL is served"),
        ("application", "503 Service Unavailable", None, "wrong", "it answers 503"),
        ("application", None, None, "warning", "no answer in time"),
        ("signing keys", "404 Not Found", {}, "wrong", "HTTP status 404"),
        ("signing keys", None, {"days": -1}, "wrong", "certificate has expired"),
        ("signing keys", None, {"address": "127.0.0.2"}, "wrong", "IP address mismatch"),
    ],
)
async def test_application_and_issuer_are_asked(
    *, environment, authority, monkeypatch, check, status, certificate, state, says
):
    if status is None:
        monkeypatch.setattr(diagnosis, "APP_SECONDS", 0.3)
    context = None if certificate is None else authority.server_context(**certificate)
    async with answering(status and http_answer(status, b""), context) as port:
        url = {"APP_URL": f"http://127.0.0.1:{port}"}
        if certificate is not None:
            url = {"AUTH_JWKS_URL": f"https://127.0.0.1:{port}/jwks"}

        finding = await found(environment | url, check)

    assert finding.state == state
    assert says in finding.says


# The secret keys


async def test_worker_notes_its_keys_and_reports_another_one_under_the_same_id(
    worker_settings, database, pool
):
    first = (await _start(worker_settings, pool), await database.fetchval("SELECT count(*) FROM secret_key"))
    key_id = worker_settings.request_secret_keys.partition(":")[0]

    again = await _start(worker_settings, pool)
    other = await _start(settings_with(worker_settings, request_secret_keys=f"{key_id}:{'B' * 43}"), pool)

    assert first == ([], 2)
    assert again == []
    assert other == [{"event": "secret_key_differs", "key_id": key_id, "log_level": "critical"}]


async def _start(settings: WorkerSettings, pool: Pool) -> list[Any]:
    """Run the part of a worker that notes its keys. Returns what it logs."""
    roles = frozenset({"notifications"})
    parts = process.Worker(settings, pool, roles, RelayWaker(pool, seconds=1.0)).parts
    with capture_logs() as logged:
        await parts["secret_keys"](asyncio.Event())
    return list(logged)
