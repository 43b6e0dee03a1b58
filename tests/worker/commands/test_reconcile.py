"""`reconcile`: whether requests, events, e-mails and calculations add up."""

from datetime import timedelta

import pytest

from service.identifiers import uuid_of
from service.postgres.pool import Connection
from tests.worker.commands.conftest import command
from tests.worker.conftest import store
from tests.worker.steps import add_email, attempt_emails, finish, intend, intend_several

pytestmark = pytest.mark.usefixtures("on_servers")


async def found(*words: str) -> dict[str, int]:
    """Return how many requests have each discrepancy, of which `reconcile` shows the first."""
    answer = await command("reconcile", *words)
    occurred = [each for each in answer.data if each["requests"]]
    assert answer.status == (1 if occurred else 0)
    assert all(uuid_of(each["first_uuid"]) in answer.text for each in occurred)
    return {each["discrepancy"]: each["requests"] for each in occurred}


async def make_old(database: Connection, by: str = "61 min") -> None:
    for table in ("calculation_request", "outbox", "email"):
        await database.execute(f"UPDATE {table} SET created_at = created_at - interval '{by}'")  # noqa: S608


async def test_finished_request_with_two_emails_adds_up(database, postman, stored_request):
    await finish(database, postman, stored_request)
    await database.execute("DELETE FROM outbox")
    await add_email(database, stored_request, 2)
    unsent = await found()
    await attempt_emails(database, postman)
    await database.execute("DELETE FROM outbox")
    await make_old(database)

    assert unsent == await found() == {}


async def test_requests_without_an_email_are_found_once_their_events_are_published(database):
    requests = [await store(database) for _ in range(15)]
    await make_old(database)
    while_pending = await found()
    await database.execute("DELETE FROM outbox")
    later = requests[-1].created_at + timedelta(hours=1)

    assert while_pending == {"event_overdue": 15, "email_overdue": 15}
    assert await found() == {"request_without_email": 15, "email_overdue": 15}
    assert await found("--since", later.isoformat()) == {}
    assert (await command("reconcile")).data[0]["first_uuid"] == min(each.id for each in requests)


async def test_email_is_overdue_after_five_minutes(database, stored_request):
    unpublished = await found()
    await intend_several(database, stored_request, 2)
    await database.execute("DELETE FROM outbox")
    await make_old(database, "4 min")
    young = await found()
    await make_old(database, "2 min")

    assert unpublished == young == {}
    assert await found() == {"email_overdue": 1}


async def test_first_email_is_overdue_from_its_create_and_a_later_one_from_its_own(database, stored_request):
    """As after an outage of the relay: the ledger has just got the e-mail."""
    await make_old(database)
    await database.execute("DELETE FROM outbox")
    await intend(database, stored_request)
    late = await found()
    await database.execute("UPDATE email SET state = 'sent'")
    await add_email(database, stored_request, 2)

    assert late == {"email_overdue": 1}
    assert await found() == {}


@pytest.mark.parametrize(
    ("reply", "overdue"),
    [
        ("452 4.2.2 The mailbox is full", 0),
        ("450 4.1.1 <ada@customer.example.com>: Recipient address rejected: unverified address", 0),
        ("450 4.1.8 <us@service.example.com>: Sender address rejected: Domain not found", 1),
        ("450 4.2.1 Peak SMTP relay limit exceeded for customer", 1),
        ("450 4.7.1 Greylisted", 1),
        ("no connection: ConnectionRefusedError", 1),
    ],
)
@pytest.mark.usefixtures("intended")
async def test_email_that_waits_for_its_recipients_mailbox_is_not_overdue(database, *, reply, overdue):
    await database.execute("UPDATE email SET attempts = 1, server_reply = $1", reply)
    await make_old(database)

    assert await found() == ({"email_overdue": overdue} if overdue else {})


async def test_held_events_are_found_when_they_are_old(database, retrying):
    await database.execute("UPDATE calculation_request SET sequence = 1 WHERE id = $1", retrying.id)
    young = await found()
    await make_old(database)

    assert young == {}
    assert await found() == {"event_overdue": 1, "email_overdue": 1}
