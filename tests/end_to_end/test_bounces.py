"""Bounces, with real servers: from the e-mail, over a relay and a customer's mail server, to the mailbox."""

import random
from collections import Counter

import pytest

from service.calculation_requests.email_changes import EmailId
from service.calculation_requests.model import CalculationRequest
from service.postgres.pool import Connection
from tests.harness import bounces, stored
from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually
from worker.mail import tokens

pytestmark = pytest.mark.long

_STATES = "SELECT state, coalesce(reason, ''), coalesce(smtp_code, 0), count(*) FROM email GROUP BY 1, 2, 3"
_FAILED = "SELECT count(*) FROM event WHERE type = 'request.email_failed'"


@pytest.fixture
def worker(worker_settings, tmp_path, mail_system):
    return worker_process(
        worker_settings,
        tmp_path,
        SMTP_URL=mail_system.smtp_url,
        BOUNCES_URL=mail_system.mailbox.url,
        BOUNCES_POLL_SECONDS="1",
    )


async def store(database: Connection, address: str) -> CalculationRequest:
    request = stored.new_request(customer_email=address)
    assert await stored.insert(database, request)
    return request


async def states(database: Connection) -> Counter[tuple[str, str, int]]:
    return Counter({tuple(key): count for *key, count in await database.fetch(_STATES)})


async def test_email_that_a_customers_server_refuses_has_bounced(worker, mail_system, database):
    customers = mail_system.customers
    customers.refusals = {
        "unknown@customer.example.com": b"550 5.1.1 No such user",
        "full@customer.example.com": b"552 5.2.2 Mailbox full",
        "late@customer.example.com": b"451 4.7.1 Greylisted",
    }
    customers.content_refusals = {"strict@customer.example.com": b"550 5.7.1 Rejected: SPF fails"}
    ends = {
        "unknown@customer.example.com": ("failed", "bounced", 550),
        "full@customer.example.com": ("failed", "bounced", 552),
        "strict@customer.example.com": ("failed", "bounced", 550),
        "late@customer.example.com": ("sent", "", 0),
        "ada@customer.example.com": ("sent", "", 0),
    }
    requests = {address: await store(database, address) for address in ends}

    async with started(worker):
        await eventually(lambda: database.fetchval(f"SELECT ({_FAILED}) = 3"))
        away = bounces.message("out_of_office", token=token_of(requests["ada@customer.example.com"]))
        await mail_system.send(away, sender="ada@customer.example.com", recipient=mail_system.mail_from)
        await eventually(lambda: [m.flags for m in mail_system.mailbox.messages] == [{"\\Flagged"}])

    assert b"Automatic reply" in mail_system.mailbox.messages[0].content
    assert await states(database) == Counter(ends.values())
    assert "bounces_read" in worker.output
    assert "@customer" not in worker.output


def token_of(request: CalculationRequest) -> str:
    return tokens.make(EmailId(request.id, 1, "invitation"), stored.KEYS, key_id=request.secret_key_id)


async def test_of_500_emails_just_the_100_that_bounce_fail_once_though_the_reader_is_killed(
    worker, mail_system, database
):
    addresses = [f"ada-{number}@customer.example.com" for number in range(500)]
    refused = random.Random(1).sample(addresses, 100)  # noqa: S311 - the same each time
    mail_system.customers.refusals = dict.fromkeys(refused, b"550 5.1.1 No such user")
    requests = {address: await store(database, address) for address in addresses}

    async with started(worker):
        for bounced in range(10, 100, 15):
            await eventually(lambda: database.fetchval(f"SELECT ({_FAILED}) >= {bounced}"))  # noqa: B023
            await worker.kill()
            worker.start()
            await worker.becomes_ready()
        await eventually(lambda: database.fetchval(f"SELECT ({_FAILED}) >= 100"), seconds=120)
        await eventually(lambda: not mail_system.mailbox.messages)

    failed = await database.fetch("SELECT request_id FROM event WHERE type = 'request.email_failed'")
    assert Counter(row[0] for row in failed) == Counter(requests[address].id for address in refused)
    assert (await states(database))["failed", "bounced", 550] == 100


async def test_full_mailbox_and_huge_messages_take_little_memory(worker, mail_system, database):
    request = await store(database, "ada@customer.example.com")
    report = bounces.message("postfix_unknown_user", token=token_of(request))
    head, boundary, rest = report.partition(b"Final-Recipient")
    many = head + b"Action: delivered\r\n\r\n" * 1_000 + boundary + rest
    mailbox = mail_system.mailbox
    mailbox.fill(100_000, report, flags="F")
    async with started(worker):
        await eventually(lambda: database.fetchval("SELECT count(*) FROM email WHERE state = 'sent'"))
        before = worker.peak_megabytes()
        for _ in range(20):
            mailbox.put(b"Subject: no report\r\n\r\n" + b"x" * 10_000_000)
        mailbox.put(many + b"x" * 10_000_000)
        await eventually(lambda: database.fetchval(f"SELECT ({_FAILED}) = 1"), seconds=180)

        grown = worker.peak_megabytes() - before

    print(f"{before:.0f} MB, and {grown:.0f} MB more")  # noqa: T201
    assert grown < 60
    assert before + grown < 200
