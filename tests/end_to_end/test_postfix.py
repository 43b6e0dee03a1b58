"""The worker and real mail servers: Debian's Postfix, as a customer's and as our relay, and Dovecot."""

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.server import trouble_of_postgres
from service.calculation_requests.email_changes import EmailId
from service.calculation_requests.model import CalculationRequest
from service.identifiers import uuid_of
from tests.harness import bounces, databases, postfix, stored
from tests.harness.postfix import MISSING_DOMAIN
from tests.harness.processes import started, worker_process
from tests.harness.servers import KillableServer, scratch_folder
from tests.harness.waiting import eventually
from worker.mail import tokens

pytestmark = pytest.mark.long

_ADA = "ada@customer.example.com"
_FAILED = "SELECT count(*) FROM event WHERE type = 'request.email_failed'"
_HAVE_BEEN_SENT = "SELECT count(*) >= $1 FROM email WHERE state = 'sent'"
_PENDING, _SENT = ("pending", None, None), ("sent", None, None)


@pytest.fixture
async def postgres():
    """A server that may be killed."""
    with scratch_folder() as folder, postgres_process(Place(folder=folder)) as process:
        async with databases.connected(process.url) as administrator:
            await databases.prepare(administrator)
        yield KillableServer(process, trouble_of_postgres)


@pytest.fixture
def database_url(postgres):
    return postgres.url


@pytest.fixture
def worker(worker_settings, tmp_path, mail_system):
    variables = {"SMTP_URL": mail_system.relay.url, "BOUNCES_URL": mail_system.mailbox.url}
    return worker_process(worker_settings, tmp_path, **variables, BOUNCES_POLL_SECONDS="1")


async def store(database, *addresses: str) -> dict[str, CalculationRequest]:
    """Store requests, whose e-mails the worker sends."""
    requests = {address: stored.new_request(customer_email=address) for address in addresses}
    for request in requests.values():
        assert await stored.insert(database, request)
    return requests


async def ends(database) -> Counter[Any]:
    """Return how many e-mails have each state, and reason and code of the failure."""
    return Counter(map(tuple, await database.fetch("SELECT state, reason, smtp_code FROM email")))


async def test_killed_mail_server_loses_no_email_and_repeats_only_unanswered_ones(
    worker_settings, tmp_path, database
):
    await store(database, *(f"customer-{number}@customer.example.com" for number in range(500)))

    with postfix.running() as server:
        async with started(worker_process(worker_settings, tmp_path, SMTP_URL=server.url)):
            for sent in range(50, 500, 50):
                await eventually(partial(database.fetchval, _HAVE_BEEN_SENT, sent))
                server.kill()
                assert (await ends(database))[_PENDING] > 0
                server.restart()
            await eventually(partial(database.fetchval, _HAVE_BEEN_SENT, 500))
            await eventually(lambda: len({message_id for message_id, _ in server.mailbox}) == 500)
        # Postfix itself may deliver an e-mail twice if it is killed, but its queue id is the same.
        accepted = Counter(message_id for message_id, _ in server.mailbox)

    assert await ends(database) == {_SENT: 500}
    tries = await database.fetch("SELECT request_id, attempts FROM email WHERE attempts > 1")
    allowed = {f"<{uuid_of(each)}": attempts for each, attempts in tries}
    assert {id_ for id_, count in accepted.items() if count > allowed.get(id_.partition(".")[0], 1)} == set()
    assert sum(accepted.values()) - 500 <= 9 * 8  # EMAIL_CONCURRENCY by default


def token_of(request: CalculationRequest) -> str:
    return tokens.make(EmailId(request.id, 1, "invitation"), stored.KEYS, key_id=request.secret_key_id)


async def test_email_that_a_customers_server_refuses_has_bounced(worker, mail_system, database):
    mail_system.customers.refusals = {
        "unknown@customer.example.com": b"550 5.1.1 No such user",
        "full@customer.example.com": b"552 5.2.2 Mailbox full",
        "late@customer.example.com": b"451 4.7.1 Greylisted",
    }
    mail_system.customers.content_refusals = {"strict@customer.example.com": b"550 5.7.1 SPF fails"}
    refused = [*mail_system.customers.refusals, "strict@customer.example.com", f"ada@{MISSING_DOMAIN}"]
    requests = await store(database, *refused, _ADA)

    async with started(worker):
        await eventually(lambda: database.fetchval(f"SELECT ({_FAILED}) = 4"))
        away = bounces.message("out_of_office", token=token_of(requests[_ADA]))
        await mail_system.send(away, sender=_ADA, recipient=mail_system.mail_from)
        await eventually(lambda: [m.flags for m in mail_system.mailbox.messages] == [{"\\Flagged"}])

    assert b"Automatic reply" in mail_system.mailbox.messages[0].content
    bounced = Counter[Any]({("failed", "bounced", code): n for code, n in ((550, 2), (552, 1), (0, 1))})
    assert await ends(database) == bounced + Counter({_SENT: 2})
    assert "bounces_read" in worker.output
    assert "@customer" not in worker.output


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
        requests = await store(database, *addresses)

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
        assert await ends(database) == {("failed", "bounced", 550): 100, _SENT: 400}


async def test_full_mailbox_and_huge_messages_take_little_memory(worker, mail_system, database):
    request = (await store(database, _ADA))[_ADA]
    report = bounces.message("postfix_unknown_user", token=token_of(request))
    head, boundary, rest = report.partition(b"Final-Recipient")
    many = head + b"Action: delivered\r\n\r\n" * 1_000 + boundary + rest
    mailbox = mail_system.mailbox
    mailbox.fill(100_000, report, flags="F")
    async with started(worker):
        await eventually(lambda: database.fetchval(_HAVE_BEEN_SENT, 1))
        before = worker.peak_megabytes()
        for _ in range(20):
            mailbox.put(b"Subject: no report\r\n\r\n" + b"x" * 10_000_000)
        mailbox.put(many + b"x" * 10_000_000)
        await eventually(lambda: database.fetchval(f"SELECT ({_FAILED}) = 1"), seconds=180)

        grown = worker.peak_megabytes() - before

    assert grown < 60
    assert before + grown < 200
