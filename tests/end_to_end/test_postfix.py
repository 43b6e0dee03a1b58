"""The worker and a real mail server, Debian's Postfix, with settings that its administrators choose."""

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from service.identifiers import uuid_of
from service.postgres.pool import Connection
from tests.harness import postfix, stored
from tests.harness.postfix import Postfix
from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually

pytestmark = pytest.mark.long

_PENDING, _SENT = ("pending", None, None), ("sent", None, None)
_HAVE_BEEN_SENT = "SELECT count(*) >= $1 FROM email WHERE state = 'sent'"
_CONNECTIONS = 8  # EMAIL_CONCURRENCY by default


@pytest.fixture
def start():
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(postfix.running(**settings))


@pytest.fixture
def sending(worker_settings, tmp_path):
    def run(server: Postfix, **variables: str) -> Any:
        usual = {"SMTP_URL": server.url, "SMTP_HELO_NAME": "worker.example.com"}
        return started(worker_process(worker_settings, tmp_path, **(usual | variables)))

    return run


async def store(database: Connection, count: int, name: str = "customer") -> None:
    """Store requests, whose e-mails the worker sends."""
    for number in range(count):
        request = stored.new_request(customer_email=f"{name}-{number}@customer.example.com")
        assert await stored.insert(database, request)


async def ends(database: Connection) -> Counter[Any]:
    """Return how many e-mails have each state, and reason and code of the failure."""
    return Counter(map(tuple, await database.fetch("SELECT state, reason, smtp_code FROM email")))


async def all_are_settled(database: Connection, count: int) -> bool:
    states = await ends(database)
    return states.total() - states[_PENDING] == count


def _of_sender(reply: str) -> dict[str, str]:
    return {"smtpd_sender_restrictions": f"check_sender_access static:{{{reply}}}"}


_OUR_DOMAIN_TOO = "customer.example.com service.example.com"
# Each of these is the reply to RCPT, because of Postfix's default smtpd_delay_reject = yes.
_FAULTS_OF_OURS = {
    "450 4.1.8": {"smtpd_sender_restrictions": "reject_unknown_sender_domain"},
    "550 5.1.0": {"virtual_mailbox_domains": _OUR_DOMAIN_TOO, "smtpd_reject_unlisted_sender": "yes"},
    "550 5.1.8": _of_sender("550 5.1.8 Domain not found"),
    "550 5.1.7": _of_sender("550 5.1.7 Undeliverable address"),
    "553 5.7.1": _of_sender("553 5.7.1 not owned by user calculations"),
    "454 4.7.1": {"virtual_mailbox_domains": "", "smtpd_relay_restrictions": "defer_unauth_destination"},
    "554 5.7.1": {"virtual_mailbox_domains": ""},
    "504 5.5.2": {"smtpd_helo_restrictions": "reject_non_fqdn_helo_hostname"},
}


@pytest.mark.parametrize("reply", _FAULTS_OF_OURS)
async def test_fault_of_our_settings_fails_no_email(start, sending, database, reply):
    server = start(**_FAULTS_OF_OURS[reply])
    await store(database, 4)
    name = "worker" if reply == "504 5.5.2" else "worker.example.com"

    async with sending(server, SMTP_HELO_NAME=name):
        await eventually(lambda: server.log.count(f": {reply} <") > 4)  # so one was tried again
        assert await ends(database) == {_PENDING: 4}
        assert await database.fetchval("SELECT left(max(server_reply), 9) FROM email") == reply
        server.reload()
        await eventually(lambda: all_are_settled(database, 4))
        await eventually(lambda: len(server.mailbox) == 4)

    assert await ends(database) == {_SENT: 4}


async def test_killed_mail_server_loses_no_email_and_repeats_only_unanswered_ones(start, sending, database):
    server = start()
    await store(database, 500)

    async with sending(server):
        for sent in range(50, 500, 50):
            await eventually(lambda: database.fetchval(_HAVE_BEEN_SENT, sent))  # noqa: B023 - awaited here
            server.kill()
            assert (await ends(database))[_PENDING] > 0
            server.restart()
        await eventually(lambda: all_are_settled(database, 500))
        await eventually(lambda: len({email.message_id for email in server.mailbox}) == 500)

    assert await ends(database) == {_SENT: 500}
    # Postfix itself may deliver an e-mail twice if it is killed, but its queue id is the same.
    accepted = Counter(email.message_id for email in set(server.mailbox))
    tries = await database.fetch("SELECT request_id, attempts FROM email WHERE attempts > 1")
    allowed = {f"<{uuid_of(each)}": attempts for each, attempts in tries}
    assert {id_ for id_, count in accepted.items() if count > allowed.get(id_.partition(".")[0], 1)} == set()
    assert sum(accepted.values()) - 500 <= 9 * _CONNECTIONS
