"""`python -m worker doctor` on real servers, with and without problems.

What it finds of Postgres and of the customer's application is shown in tests/service/commands/test_doctor.py.
"""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aio_pika import ExchangeType, Message
from aiosmtpd.smtp import SMTP, AuthResult
from structlog.testing import capture_logs
from yarl import URL

from deploy.local.machine.ports import free_port
from service import diagnosis
from service.diagnosis import Finding
from service.every_firm import email_changes
from service.outbox.lanes import RelayWaker
from service.postgres.pool import Pool
from tests.harness.command_line import run
from tests.harness.fixed_answers import answering, http_answer
from tests.harness.mail_server import MailServer, ScriptedMailServer
from tests.harness.processes import environment_of
from tests.harness.queues import count
from tests.harness.waiting import eventually
from tests.model.scripted_broker import ScriptedBroker
from tests.worker.commands.steps import intend
from tests.worker.conftest import hold_events, settings_with, store
from worker import process
from worker.commands.doctor import examine_worker
from worker.rabbitmq import topology
from worker.settings import WorkerSettings

QUEUES = ["notifications", "calculation-results"]
CHECKS = [
    "settings",
    *["postgres", "secret keys", "events", "e-mails", "requests"],
    "application",
    "rabbitmq",
    *[f"queue {name}" for name in QUEUES],
    *[f"queue {name}.dead-letters" for name in QUEUES],
    "rabbitmq's alarm",
    "mail server",
]


@pytest.fixture
async def environment(worker_settings):
    """The environment of a worker without problems, except that its mail server has no encryption."""
    async with answering(http_answer("200 OK", b"")) as port:
        yield environment_of(worker_settings, APP_URL=f"http://127.0.0.1:{port}")


@pytest.fixture
async def reading(channel):
    """Consumers of both queues, as workers are."""
    for name in QUEUES:
        await (await channel.get_queue(name)).consume(_ignore)


async def _ignore(_: object) -> None:
    """Leave the message unacknowledged."""


async def examined(environment: Mapping[str, str]) -> dict[str, Finding]:
    """Return the findings by their checks."""
    return {finding.check: finding for finding in await examine_worker(environment)}


@pytest.mark.usefixtures("reading")
async def test_healthy_environment_has_a_line_for_each_check(environment):
    ended = await run("worker", "doctor", environment=environment)
    findings = await examine_worker(environment)

    assert (ended.status, ended.errors) == (0, "")
    assert len(ended.output.splitlines()) == len(CHECKS)
    assert ended.output.startswith("warning  mail server")
    assert [finding.check for finding in findings] == CHECKS
    assert [finding.check for finding in findings if finding.state != "ok"] == ["mail server"]


async def test_command_says_what_is_wrong_and_prints_no_secret(environment):
    nowhere = f"me:hunter2@127.0.0.1:{free_port()}"
    environment |= {
        "DATABASE_URL": f"postgresql://{nowhere}/x",
        "AMQP_URL": f"amqp://{nowhere}/",
        "SMTP_URL": f"smtp://{nowhere}",
        "MAIL_FROM": "hunter2",
        "REQUEST_SECRET_KEYS": "current:hunter2",
    }

    ended = await run("worker", "doctor", "--json", environment=environment)

    findings = json.loads(ended.output)
    assert [(finding["check"], finding["state"]) for finding in findings] == [
        ("settings", "wrong"),
        ("settings", "wrong"),
        ("postgres", "wrong"),
        ("rabbitmq", "wrong"),
        ("mail server", "warning"),  # not checked without MAIL_FROM
        ("application", "ok"),
    ]
    assert {finding["says"] for finding in findings[2:4]} == {"connection refused"}
    assert (ended.status, ended.errors) == (1, "")
    assert "hunter2" not in ended.output


# What is pending


@pytest.mark.usefixtures("reading")
async def test_events_and_emails_are_counted_by_state(environment, database):
    refused, pending, cancelled = [await store(database) for _ in range(3)]
    await hold_events(database, refused.id)
    await intend(database, pending)
    await database.execute(
        "UPDATE email SET server_reply = '450 4.2.1 <someone@example.com> later', attempts = 1"
    )
    await database.execute("UPDATE outbox_held SET attempts = 1")
    await email_changes.cancel(database, [cancelled.id])

    findings = await examined(environment)

    assert findings["events"].state == "warning"
    assert re.search(r"3 pending, the oldest for \d+ s, 1 retrying, ", findings["events"].says)
    assert (findings["e-mails"].state, findings["e-mails"].says) == (
        "warning",
        "of the last day: 1 failed cancelled, 1 pending 450",
    )


@pytest.mark.usefixtures("reading")
async def test_customer_without_an_email_is_found(environment, database):
    request = await store(database)
    await database.execute("DELETE FROM outbox")
    await database.execute("UPDATE calculation_request SET created_at = now() - interval '1 hour'")

    finding = (await examined(environment))["request_without_email"]

    assert finding.state == "wrong"
    assert finding.says.startswith("1 requests: ")
    assert finding.do is not None
    assert request.uuid in finding.do


# RabbitMQ


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda url: url.with_port(1), "connection refused"),
        (lambda url: url.with_host("nowhere.invalid"), "unknown host"),
        (lambda url: url.with_password("hunter2"), "user or password refused"),
        (lambda url: url.with_path("/nowhere"), "it closes the connection"),
    ],
    ids=["port", "host", "password", "virtual host"],
)
async def test_unavailable_broker_is_found(environment, change, says):
    environment["AMQP_URL"] = str(change(URL(environment["AMQP_URL"])))

    finding = (await examined(environment))["rabbitmq"]

    assert finding.state == "wrong"
    assert finding.says.startswith(says)


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
        finding = (await examined(environment))["queue notifications"]
        assert (finding.state, finding.says) == ("wrong", "missing")


async def test_queue_with_other_arguments_is_found(environment, channel):
    queue = topology.CALCULATION_RESULTS
    await channel.queue_delete(queue.name)
    arguments = {**queue.arguments, "x-delivery-limit": 3}
    await channel.declare_queue(queue.name, durable=True, arguments=arguments)

    finding = (await examined(environment))["calculation-results"]

    assert finding.state == "wrong"
    assert "x-delivery-limit" in finding.says
    await channel.queue_delete(queue.name)


async def test_exchange_of_another_type_is_found(environment, channel):
    await channel.exchange_delete(topology.REQUESTS)
    await channel.declare_exchange(topology.REQUESTS, ExchangeType.FANOUT, durable=True)

    finding = (await examined(environment))["calculation-requests"]

    assert finding.state == "wrong"
    assert "'fanout'" in finding.says
    await channel.exchange_delete(topology.REQUESTS)


async def test_messages_that_nobody_reads_and_dead_letters_are_found(environment, channel):
    live, graveyard = topology.NOTIFICATIONS.name, topology.NOTIFICATIONS.dead_letters
    for queue in (live, graveyard):
        await channel.default_exchange.publish(Message(b"message"), queue)

    async def counted() -> bool:
        return [await count(channel, queue) for queue in (live, graveyard)] == [1, 1]

    await eventually(counted)

    findings = await examined(environment)

    unread, empty, dead = [findings[f"queue {name}"] for name in (*QUEUES, graveyard)]
    assert (unread.state, unread.says) == ("wrong", "1 messages, 0 consumers")
    assert (empty.state, empty.says) == ("warning", "0 messages, 0 consumers")
    assert (dead.state, dead.says) == ("warning", "1 messages")


async def test_alarm_is_found(environment):
    async with ScriptedBroker() as broker:
        environment["AMQP_URL"] = broker.url
        before = (await examined(environment))["rabbitmq's alarm"]
        broker.raise_alarm()

        finding = (await examined(environment))["rabbitmq's alarm"]

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


async def mail_finding(environment: dict[str, str], url: str) -> Finding:
    """Return the finding about the mail server at this SMTP_URL."""
    findings = await examined({**environment, "SMTP_URL": url})
    return findings["mail server"]


async def test_unencrypted_mail_server_is_a_warning(environment, mail_server):
    finding = await mail_finding(environment, mail_server.url)

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
        finding = await mail_finding(environment, f"smtp+starttls://{address}")

    assert (finding.state, finding.says) == (state, says)


async def test_mail_server_without_starttls_is_found(environment, mail_server):
    url = mail_server.url.replace("smtp", "smtp+starttls", 1)

    finding = await mail_finding(environment, url)

    assert (finding.state, finding.says) == ("wrong", "it does not offer STARTTLS")


async def test_refused_password_is_found(environment, authority):
    def refuse(*_: object) -> AuthResult:
        return AuthResult(success=False, handled=False)

    context = authority.server_context()
    async with secure_mail_server(context, authenticator=refuse) as address:
        finding = await mail_finding(environment, f"smtp+starttls://me:hunter2@{address}")

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

        finding = await mail_finding(environment, server.url)

    assert (finding.state, finding.says) == ("wrong", says)


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
