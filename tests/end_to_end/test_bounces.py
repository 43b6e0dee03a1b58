"""Bounces, with real servers: from the e-mail, over a relay and a customer's mail server, to the mailbox."""

import random
from collections import Counter
from functools import partial

import pytest

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.server import trouble_of_postgres
from service.calculation_requests.email_changes import EmailId
from service.calculation_requests.model import CalculationRequest
from service.postgres.pool import Connection
from tests.harness import bounces, databases, scratch, stored
from tests.harness.postfix import MISSING_DOMAIN
from tests.harness.processes import started, worker_process
from tests.harness.servers import KillableServer
from tests.harness.waiting import eventually
from worker.mail import tokens

pytestmark = pytest.mark.long

_STATES = "SELECT state, coalesce(reason, ''), coalesce(smtp_code, 0), count(*) FROM email GROUP BY 1, 2, 3"
_FAILED = "SELECT count(*) FROM event WHERE type = 'request.email_failed'"


@pytest.fixture
async def postgres():
    """A server that may be killed."""
    with scratch.folder() as folder, postgres_process(Place(folder=folder)) as process:
        async with databases.connected(process.url) as administrator:
            await databases.prepare(administrator)
        yield KillableServer(process, trouble_of_postgres)


@pytest.fixture
def database_url(postgres):
    return postgres.url


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
        f"ada@{MISSING_DOMAIN}": ("failed", "bounced", 0),
        "late@customer.example.com": ("sent", "", 0),
        "ada@customer.example.com": ("sent", "", 0),
    }
    requests = {address: await store(database, address) for address in ends}

    async with started(worker):
        await eventually(lambda: database.fetchval(f"SELECT ({_FAILED}) = 4"))
        away = bounces.message("out_of_office", token=token_of(requests["ada@customer.example.com"]))
        await mail_system.send(away, sender="ada@customer.example.com", recipient=mail_system.mail_from)
        await eventually(lambda: [m.flags for m in mail_system.mailbox.messages] == [{"\\Flagged"}])

    assert b"Automatic reply" in mail_system.mailbox.messages[0].content
    assert await states(database) == Counter(ends.values())
    assert "bounces_read" in worker.output
    assert "@customer" not in worker.output


def token_of(request: CalculationRequest) -> str:
    return tokens.make(EmailId(request.id, 1, "invitation"), stored.KEYS, key_id=request.secret_key_id)


async def test_of_500_emails_just_the_100_that_bounce_fail_once_whatever_is_killed(
    worker, mail_system, postgres
):
    addresses = [f"ada-{number}@customer.example.com" for number in range(500)]
    refused = random.Random(1).sample(addresses, 100)  # noqa: S311 - the same each time
    mail_system.customers.refusals = dict.fromkeys(refused, b"550 5.1.1 No such user")
    mailbox = mail_system.mailbox
    with mailbox.connected() as connection:
        connection.append("INBOX", r"(\Flagged)", None, b"Subject: to keep\r\n\r\n")
    async with databases.connected(postgres.url) as database:
        requests = {address: await store(database, address) for address in addresses}

    async def have_bounced(number: int) -> bool:
        async with databases.connected(postgres.url) as database:
            return await database.fetchval(f"SELECT ({_FAILED}) >= {number}")

    async with started(worker):
        for bounced, victim in zip(range(10, 100, 15), 2 * ["worker", "mailbox", "postgres"], strict=True):
            await eventually(partial(have_bounced, bounced), seconds=120)
            if victim == "worker":
                await worker.kill()
                worker.start()
                await worker.becomes_ready()
            elif victim == "mailbox":
                mailbox.kill()
                mailbox.restart()
            else:
                await postgres.kill()
                await postgres.start()
        await eventually(partial(have_bounced, 100), seconds=240)
        await eventually(lambda: len(mailbox.messages) == 1)

    assert mailbox.messages[0].flags == {"\\Flagged"}
    async with databases.connected(postgres.url) as database:
        failed = await database.fetch("SELECT request_id FROM event WHERE type = 'request.email_failed'")
        assert Counter(row[0] for row in failed) == Counter(requests[address].id for address in refused)
        assert await states(database) == {("failed", "bounced", 550): 100, ("sent", "", 0): 400}


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
