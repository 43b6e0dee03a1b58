"""`python -m worker doctor` on real servers, with and without problems."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aio_pika import ExchangeType, Message
from aio_pika.abc import AbstractChannel
from aiosmtpd.smtp import SMTP, AuthResult
from yarl import URL

from deploy.local.machine.ports import free_port
from service.diagnosis import Finding
from tests.harness.certificates import Authority
from tests.harness.command_line import run
from tests.harness.mail_server import MailServer, ScriptedMailServer
from tests.harness.processes import environment_of
from tests.harness.queues import count
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from worker.commands.doctor import examine_worker
from worker.rabbitmq import topology
from worker.settings import WorkerSettings

PARTS = [
    "broker",
    "exchange calculation-requests",
    "exchange calculations",
    "exchange calculation-requests.dead-letters",
    "queue notifications",
    "queue notifications.dead-letters",
    "queue calculation-results",
    "queue calculation-results.dead-letters",
]


@pytest.fixture
def environment(worker_settings: WorkerSettings) -> dict[str, str]:
    """The environment of a worker without problems, except that its mail server has no encryption."""
    return environment_of(worker_settings)


async def examined(environment: Mapping[str, str], *, timeout_seconds: float = 10.0) -> dict[str, Finding]:
    """Return the findings by their checks."""
    findings = await examine_worker(environment, processes=1, timeout_seconds=timeout_seconds)
    return {finding.check: finding for finding in findings}


async def test_healthy_environment_has_no_failures(environment: Mapping[str, str]) -> None:
    findings = await examine_worker(environment, processes=1, timeout_seconds=10.0)

    database = ["postgres", "schema", "event ids", "clock", "connections", "secret keys"]
    checks = ["settings", *database, "listening", *PARTS, "mail server"]
    assert [finding.check for finding in findings] == checks
    assert [finding.check for finding in findings if finding.state != "ok"] == ["mail server"]


async def test_command_prints_a_line_for_each_check(environment: Mapping[str, str]) -> None:
    ended = await run("worker", "doctor", "--processes", "2", environment=environment)

    assert (ended.status, ended.errors) == (0, "")
    assert len(ended.output.splitlines()) == 17
    assert "needs 22 of" in ended.output  # two pools of 10, and a connection each to listen


async def test_command_says_what_fails_and_prints_no_secret(environment: dict[str, str]) -> None:
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
        ("settings", "fail"),
        ("settings", "fail"),
        ("postgres", "fail"),
        ("listening", "fail"),
        ("broker", "fail"),
        ("mail server", "fail"),
    ]
    assert {finding["says"] for finding in findings[2:]} == {"connection refused"}
    assert (ended.status, ended.errors) == (1, "")
    assert "hunter2" not in ended.output


async def test_every_bad_variable_is_named_and_its_checks_are_skipped(
    environment: dict[str, str],
) -> None:
    environment |= {"DATABASE_URL": "", "AMQP_URL": "http://x", "SMTP_URL": "x", "EMAIL_CONCURRENCY": "0"}

    findings = await examine_worker(environment, processes=1, timeout_seconds=10.0)

    named = ("AMQP_URL", "DATABASE_URL", "EMAIL_CONCURRENCY", "SMTP_URL")
    wrong = [finding.says for finding in findings if finding.state == "fail"]
    assert all(name in says for name, says in zip(named, wrong, strict=True))
    assert [finding.says for finding in findings if finding.state == "warn"] == [
        "not checked without DATABASE_URL",
        "not checked without DATABASE_URL",
        "not checked without AMQP_URL",
        "not checked without SMTP_URL",
    ]


# The broker


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
async def test_unavailable_broker_is_found(
    environment: dict[str, str], change: Callable[[URL], URL], says: str
) -> None:
    environment["AMQP_URL"] = str(change(URL(environment["AMQP_URL"])))

    finding = (await examined(environment))["broker"]

    assert finding.state == "fail"
    assert finding.says.startswith(says)


@pytest.mark.parametrize("marker", [b"AMQP", b"notifications"], ids=["at once", "later"])
async def test_wait_for_a_silent_broker_is_limited(
    environment: dict[str, str], broker_link: TcpProxy, marker: bytes
) -> None:
    environment["AMQP_URL"] = broker_link.url
    broker_link.hold_before(marker)

    async with asyncio.timeout(5):
        finding = (await examined(environment, timeout_seconds=0.5))["broker"]

    assert (finding.state, finding.says) == ("fail", "no answer within 0.5 s")


async def test_missing_queues_and_exchanges_are_found_and_not_created(
    environment: Mapping[str, str], channel: AbstractChannel
) -> None:
    await channel.queue_delete(topology.NOTIFICATIONS.name)
    await channel.exchange_delete(topology.CALCULATIONS)

    for _ in range(2):
        findings = await examined(environment)

        for name in ("queue notifications", "exchange calculations"):
            assert (findings[name].state, findings[name].says) == ("warn", "missing")


@pytest.mark.parametrize(
    ("kept", "named"),  # RabbitMQ names the first argument that differs
    [
        ((), "x-dead-letter-exchange"),
        (("x-dead-letter-exchange", "x-dead-letter-routing-key", "x-overflow"), "x-queue-type"),
    ],
)
async def test_classic_queue_is_found(
    environment: Mapping[str, str], channel: AbstractChannel, kept: tuple[str, ...], named: str
) -> None:
    queue = topology.NOTIFICATIONS
    await channel.queue_delete(queue.name)
    arguments = {name: queue.arguments[name] for name in kept}
    await channel.declare_queue(queue.name, durable=True, arguments=arguments)

    findings = await examined(environment)

    assert findings["queue notifications"].state == "fail"
    assert named in findings["queue notifications"].says
    assert findings["queue calculation-results"].state == "ok"
    await channel.queue_delete(queue.name)


async def test_queue_with_other_arguments_is_found(
    environment: Mapping[str, str], channel: AbstractChannel
) -> None:
    queue = topology.CALCULATION_RESULTS
    await channel.queue_delete(queue.name)
    arguments = {**queue.arguments, "x-delivery-limit": 3}
    await channel.declare_queue(queue.name, durable=True, arguments=arguments)

    finding = (await examined(environment))["queue calculation-results"]

    assert finding.state == "fail"
    assert "x-delivery-limit" in finding.says
    await channel.queue_delete(queue.name)


async def test_exchange_of_another_type_is_found(
    environment: Mapping[str, str], channel: AbstractChannel
) -> None:
    await channel.exchange_delete(topology.REQUESTS)
    await channel.declare_exchange(topology.REQUESTS, ExchangeType.FANOUT, durable=True)

    finding = (await examined(environment))["exchange calculation-requests"]

    assert finding.state == "fail"
    assert "'fanout'" in finding.says
    await channel.exchange_delete(topology.REQUESTS)


async def test_dead_letters_are_found(environment: Mapping[str, str], channel: AbstractChannel) -> None:
    graveyard = topology.NOTIFICATIONS.dead_letters
    await channel.default_exchange.publish(Message(b"dead"), graveyard)

    async def counted() -> bool:
        return await count(channel, graveyard) == 1

    await eventually(counted)

    finding = (await examined(environment))[f"queue {graveyard}"]

    assert (finding.state, finding.says) == ("warn", "quorum, durable; 1 messages")


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


async def mail_finding(environment: dict[str, str], url: str, *, timeout_seconds: float = 10.0) -> Finding:
    """Return the finding about the mail server at this SMTP_URL."""
    findings = await examined({**environment, "SMTP_URL": url}, timeout_seconds=timeout_seconds)
    return findings["mail server"]


async def test_unencrypted_mail_server_is_a_warning(
    environment: dict[str, str], mail_server: MailServer
) -> None:
    finding = await mail_finding(environment, mail_server.url)

    assert (finding.state, finding.says) == ("warn", "accepts MAIL_FROM, but without encryption")
    assert mail_server.accepted == []


@pytest.mark.parametrize(
    ("days", "state", "says"),
    [
        (100.5, "ok", "accepts MAIL_FROM, encrypted; its certificate expires in 100 days"),
        (5.5, "warn", "accepts MAIL_FROM, encrypted; its certificate expires in 5 days"),
        (-1, "fail", "its certificate is not accepted: certificate has expired"),
    ],
    ids=["valid", "expires soon", "expired"],
)
async def test_certificate_of_the_mail_server_is_checked(
    environment: dict[str, str], authority: Authority, days: float, state: str, says: str
) -> None:
    async with secure_mail_server(authority.server_context(days=days)) as address:
        finding = await mail_finding(environment, f"smtp+starttls://{address}")

    assert (finding.state, finding.says) == (state, says)


async def test_certificate_of_another_host_is_refused(
    environment: dict[str, str], authority: Authority
) -> None:
    async with secure_mail_server(authority.server_context(address="127.0.0.2")) as address:
        finding = await mail_finding(environment, f"smtp+starttls://{address}")

    assert finding.state == "fail"
    assert "IP address mismatch" in finding.says


async def test_mail_server_without_starttls_is_found(
    environment: dict[str, str], mail_server: MailServer
) -> None:
    url = mail_server.url.replace("smtp", "smtp+starttls", 1)

    finding = await mail_finding(environment, url)

    assert (finding.state, finding.says) == ("fail", "it does not offer STARTTLS")


async def test_mail_server_without_tls_is_found(environment: dict[str, str], mail_server: MailServer) -> None:
    url = mail_server.url.replace("smtp", "smtps", 1)

    finding = await mail_finding(environment, url)

    assert (finding.state, finding.says) == ("fail", "the TLS handshake failed")


async def test_refused_password_is_found(environment: dict[str, str], authority: Authority) -> None:
    def refuse(*_: object) -> AuthResult:
        return AuthResult(success=False, handled=False)

    context = authority.server_context()
    async with secure_mail_server(context, authenticator=refuse) as address:
        finding = await mail_finding(environment, f"smtp+starttls://me:hunter2@{address}")

    assert (finding.state, finding.says) == ("fail", "user or password refused (535)")


@pytest.mark.parametrize(
    ("command", "answer", "says"),
    [
        ("MAIL", b"550 Not you", "MAIL_FROM refused (550)"),
        ("greeting", b"554 Not you", "it answers 554"),
        ("EHLO", b"421 Going down", "it answers 421"),
    ],
)
async def test_refusing_mail_server_is_found(
    environment: dict[str, str], command: str, answer: bytes, says: str
) -> None:
    async with ScriptedMailServer() as server:
        server.replies[command] = answer

        finding = await mail_finding(environment, server.url)

    assert (finding.state, finding.says) == ("fail", says)


async def test_wait_for_a_silent_mail_server_is_limited(environment: dict[str, str]) -> None:
    async with ScriptedMailServer() as server:
        server.replies["EHLO"] = b"250-and so on"  # A reply that is never finished.

        finding = await mail_finding(environment, server.url, timeout_seconds=0.5)

    assert (finding.state, finding.says) == ("fail", "no answer within 0.5 s")


async def test_mail_server_is_not_checked_with_an_invalid_sender(
    environment: dict[str, str], mail_server: MailServer
) -> None:
    finding = await mail_finding({**environment, "MAIL_FROM": "nobody"}, mail_server.url)

    assert (finding.state, finding.says) == ("warn", "not checked without MAIL_FROM")
