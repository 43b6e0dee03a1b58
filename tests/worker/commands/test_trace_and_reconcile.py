"""`trace`: the progress of one request. `reconcile`: whether requests, events and e-mails add up."""

from datetime import timedelta
from typing import Any

import pytest

from service.calculation_requests.model import CalculationRequest
from service.identifiers import uuid_of
from service.postgres.pool import Connection
from tests.harness.stored import KEYS
from tests.worker.commands.conftest import command, rendered
from tests.worker.conftest import hold_events, store
from tests.worker.steps import add_email, attempt_emails, calculate, finish, intend, key_of
from worker.consumers.calculations import CalculationAlreadyRecorded

pytestmark = pytest.mark.usefixtures("on_servers")


async def trace_of(request: CalculationRequest) -> dict[str, Any]:
    """Return the answer of `trace`, which must contain no personal data and no secret."""
    answer = await command("trace", request.uuid)
    personal = ("@", request.secret_and_url(KEYS, "")[0], request.customer_last_name)
    assert not any(each in rendered(answer) for each in personal)
    assert answer.text.splitlines()[2].startswith(request.uuid)
    trace: dict[str, Any] = answer.data
    return trace


def states(trace: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(event["type"], event["sequence"], event["state"]) for event in trace["events"]]


async def test_request_is_shown_with_every_step_even_after_its_erasure(database, postman, stored_request):
    new = await trace_of(stored_request)
    await finish(database, postman, stored_request)
    for calculation_id in ("C-2", "C-3", "C-3"):
        with pytest.raises(CalculationAlreadyRecorded):
            await calculate(database, stored_request.uuid, calculation_id)
    await database.execute("DELETE FROM outbox")
    finished = await trace_of(stored_request)
    await command("request", "erase", stored_request.uuid, "--by", "Ada")
    erased = await trace_of(stored_request)

    first, last, at_the_end = (each["request"] for each in (new, finished, erased))
    assert (states(new), new["emails"]) == ([("request.created", 1, "pending")], [])
    assert (first["tenant"], first["calculation_id"]) == (stored_request.conveyancer_id, None)
    assert first["stored_at"] == stored_request.created_at
    types = ["request.created", "request.email_sent", "request.calculated"]
    assert states(finished) == [(each, number, "published") for number, each in enumerate(types, start=1)]
    [sent], [kept], [action] = finished["emails"], erased["emails"], erased["actions"]
    assert (sent["state"], sent["server_reply"]) == ("sent", "OK accepted")
    assert (last["calculation_id"], last["refused_calculation"]) == ("C-1", "C-3")
    assert states(erased) == [*states(finished), ("request.erased", 4, "pending")]
    erased_at = at_the_end["erased_at"]
    assert erased_at is not None
    assert at_the_end == last | {"erased_at": erased_at, "refused_calculation": None}
    assert kept["conveyancer"] == stored_request.conveyancer_id
    assert (action["action"], action["operator"]) == ("request erase", "Ada")


async def test_held_event_and_unsent_email_have_their_errors(database, postman, mail_server, retrying):
    mail_server.rcpt_reply = "451 4.7.1 <ada@customer.example.com>: no"
    await intend(database, retrying)
    await attempt_emails(database, postman)

    trace = await trace_of(retrying)

    assert states(trace) == [("request.created", 1, "retrying"), ("request.email_sent", 2, "waiting")]
    first, _ = trace["events"]
    assert (first["attempts"], first["last_error"]) == (3, "returned: no queue is bound for it")
    [email] = trace["emails"]
    assert (email["state"], email["server_reply"]) == ("pending", "451 4.7.1 <[address]>: no")
    assert None not in (first["next_attempt_at"], email["next_attempt_at"])


async def test_changes_by_operators_are_shown(database, stored_request):
    await database.execute(
        """
        INSERT INTO operator_action (conveyancer_id, action, operator, at)
        VALUES ($1, 'conveyancer disable', 'Eve', now() - interval '1 h') -- before there was the request
        """,
        stored_request.conveyancer_id,
    )
    by = ("--by", "Ada", "--note", "a test of the firm")
    await command("emails", "cancel", "--uuid", stored_request.uuid, *by)
    await command("emails", "resend", "--uuid", stored_request.uuid, "--by", "Bob")
    await command("outbox", "replay", "--uuid", stored_request.uuid, "--by", "Cy")
    await database.execute("UPDATE email SET requested_by = 'crm' WHERE number = 2")

    trace = await trace_of(stored_request)

    columns = ("action", "subject", "operator", "note")
    assert [tuple(each[column] for column in columns) for each in trace["actions"]] == [
        ("emails cancel", key_of(stored_request), "Ada", "a test of the firm"),
        ("emails resend", key_of(stored_request, 2), "Bob", None),
        ("outbox replay", "2 events", "Cy", None),
    ]
    columns = ("number", "kind", "requested_by", "state")
    emails = [tuple(email[column] for column in columns) for email in trace["emails"]]
    assert emails == [(1, "invitation", None, "failed"), (2, "invitation", "crm", "pending")]


async def discrepancies(*words: str) -> dict[str, int]:
    """Return how many requests have each discrepancy, of which `reconcile` shows the first."""
    answer = await command("reconcile", *words)
    occurred = [each for each in answer.data if each["requests"]]
    assert answer.status == (1 if occurred else 0)
    assert all(uuid_of(each["first_uuid"]) in answer.text for each in occurred)
    return {each["discrepancy"]: each["requests"] for each in occurred}


async def make_old(database: Connection, by: str = "61 min") -> None:
    for table in ("calculation_request", "outbox", "email"):
        await database.execute(f"UPDATE {table} SET created_at = created_at - interval '{by}'")  # noqa: S608


async def test_requests_without_an_email_are_found_once_their_events_are_published(database):
    requests = [await store(database) for _ in range(15)]
    await hold_events(database, requests[0].id)
    young = await discrepancies()
    await make_old(database)
    while_pending = await discrepancies()
    await database.execute("DELETE FROM outbox")
    later = requests[-1].created_at + timedelta(hours=1)

    assert (young, while_pending) == ({}, {"event_overdue": 15, "email_overdue": 15})
    assert await discrepancies() == {"request_without_email": 15, "email_overdue": 15}
    assert await discrepancies("--since", later.isoformat()) == {}
    assert (await command("reconcile")).data[0]["first_uuid"] == min(each.id for each in requests)


async def test_email_is_overdue_five_minutes_after_its_request_or_itself(database, postman, stored_request):
    found = [await discrepancies()]
    await make_old(database, "4 min")
    await database.execute("DELETE FROM outbox")
    await intend(database, stored_request)  # late, as after an outage of the relay
    found.append(await discrepancies())
    await make_old(database, "2 min")
    found.append(await discrepancies())
    await database.execute("UPDATE email SET state = 'sent'")
    await add_email(database, stored_request, 2)
    found.append(await discrepancies())
    await make_old(database, "6 min")
    found.append(await discrepancies())
    await attempt_emails(database, postman)
    await calculate(database, stored_request.uuid)
    await database.execute("DELETE FROM outbox")
    await make_old(database)

    assert [*found, await discrepancies()] == [{}, {}, {"email_overdue": 1}, {}, {"email_overdue": 1}, {}]


@pytest.mark.usefixtures("intended")
async def test_email_that_waits_for_its_recipients_mailbox_is_not_overdue(database):
    overdue = {
        "452 4.2.2 The mailbox is full": 0,
        "450 4.1.1 <ada@customer.example.com>: Recipient address rejected: unverified address": 0,
        "450 4.1.8 <us@service.example.com>: Sender address rejected: Domain not found": 1,
        "450 4.2.1 Peak SMTP relay limit exceeded for customer": 1,
        "450 4.7.1 Greylisted": 1,
        "no connection: ConnectionRefusedError": 1,
    }
    await make_old(database)
    found = {}
    for reply in overdue:
        await database.execute("UPDATE email SET attempts = 1, server_reply = $1", reply)
        found[reply] = (await discrepancies()).get("email_overdue", 0)

    assert found == overdue
