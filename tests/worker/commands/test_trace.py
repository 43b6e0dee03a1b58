"""`trace`: the progress of one request."""

import pytest

from service.calculation_requests.model import CalculationRequest
from tests.worker.commands.conftest import command, rendered
from tests.worker.commands.steps import attempt_emails, calculate, intend, refuse_email
from tests.worker.conftest import KEYS, announce_next, hold_events
from worker.commands.trace import Trace
from worker.settings import WorkerSettings


async def trace_of(settings: WorkerSettings, request: CalculationRequest) -> Trace:
    """Return the answer of `trace`, which must contain no personal data and no secret."""
    answer = await command(settings, "trace", request.uuid)
    said = rendered(answer)
    assert "@" not in said
    assert request.secret_and_url(KEYS, "")[0] not in said
    assert request.customer_last_name not in said
    trace: Trace = answer.data
    assert answer.text.splitlines()[:2] == [request.uuid, trace.conclusion]
    return trace


def states(trace: Trace) -> list[tuple[str, int, str]]:
    """Return the state of each event."""
    return [(event.type, event.sequence, event.state) for event in trace.events]


async def test_new_request_is_pending_and_then_published_without_an_email(
    worker_settings, relay_once, stored_request
):
    pending = await trace_of(worker_settings, stored_request)
    while await relay_once():
        pass

    published = await trace_of(worker_settings, stored_request)

    assert states(pending) == [("request.created", 1, "pending")]
    assert pending.stored_at == stored_request.created_at
    assert pending.tenant == stored_request.conveyancer_id
    assert pending.calculated_at is None
    assert pending.conclusion == "request.created has not been published: it is pending."
    assert states(published) == [("request.created", 1, "published")]
    assert published.emails == []
    assert published.conclusion.startswith("request.created was published, but there is no e-mail yet")


async def test_held_event_is_shown_with_its_error(worker_settings, database, stored_request):
    await announce_next(database, stored_request.id)
    await hold_events(database, stored_request.id)
    await database.execute(
        """
        UPDATE outbox_held
           SET attempts = 10, last_error = 'refused by the broker', next_attempt_at = now()
         WHERE sequence = 1
        """
    )

    answer = await command(worker_settings, "trace", stored_request.uuid)

    trace = await trace_of(worker_settings, stored_request)
    assert states(trace) == [("request.created", 1, "retrying"), ("request.email_sent", 2, "waiting")]
    assert "event 1, retrying after 10 attempts, next at 20" in answer.text
    assert "refused by the broker" in answer.text


async def test_postponed_email_is_shown_with_the_reply_of_the_mail_server_but_no_address(
    worker_settings, database, postman, mail_server, stored_request
):
    mail_server.rcpt_reply = "451 4.7.1 <ada@customer.example.com>: greylisted"
    await intend(database, stored_request)
    await attempt_emails(database, postman)

    trace = await trace_of(worker_settings, stored_request)

    [email] = trace.emails
    assert email.state == "pending"
    assert email.attempts >= 1
    assert email.next_attempt_at is not None
    assert email.server_reply == "451 4.7.1 <[address]>: greylisted"
    assert trace.conclusion == "The mail server has not accepted the e-mail yet."


async def test_refused_email_is_shown_as_failed(
    worker_settings, database, postman, mail_server, stored_request
):
    await refuse_email(database, postman, mail_server, stored_request)

    trace = await trace_of(worker_settings, stored_request)

    assert states(trace)[1] == ("request.email_failed", 2, "pending")
    assert trace.conclusion == "The e-mail has failed: refused."


async def test_finished_request_is_shown_with_every_step(worker_settings, database, postman, stored_request):
    await intend(database, stored_request)
    await attempt_emails(database, postman)
    before = await trace_of(worker_settings, stored_request)
    await calculate(database, stored_request)
    await database.execute("DELETE FROM outbox WHERE sequence < 3")

    trace = await trace_of(worker_settings, stored_request)

    assert before.conclusion == "The mail server has accepted the e-mail. There is no calculation yet."
    assert states(trace) == [
        ("request.created", 1, "published"),
        ("request.email_sent", 2, "published"),
        ("request.calculated", 3, "pending"),
    ]
    assert [(email.state, email.server_reply) for email in trace.emails] == [("sent", "OK accepted")]
    assert trace.calculation_id == "C-1"
    assert trace.calculated_at is not None
    assert trace.conclusion == "The request has its calculation."


async def test_text_lists_the_steps_in_the_order_of_time(worker_settings, database, stored_request):
    await calculate(database, stored_request)
    await database.execute("UPDATE calculation_request SET calculated_at = calculated_at + interval '1 h'")
    await database.execute("DELETE FROM outbox")

    text = (await command(worker_settings, "trace", stored_request.uuid)).text

    assert [line.split("  ")[0] for line in text.splitlines()[3:]] == [
        "what",
        "stored",
        "request.created",
        "request.calculated",
        "calculation",
    ]


async def test_changes_by_operators_are_shown(worker_settings, database, stored_request):
    await database.execute(
        """
        INSERT INTO operator_action (conveyancer_id, action, operator, at)
        VALUES ($1, 'conveyancer disable', 'Eve', now() - interval '1 h') -- before there was the request
        """,
        stored_request.conveyancer_id,
    )
    key = f"{stored_request.uuid}.request.created.1"
    by = ("--by", "Ada", "--note", "a test of the firm")
    await command(worker_settings, "emails", "cancel", "--uuid", stored_request.uuid, *by)
    await command(worker_settings, "emails", "resend", "--uuid", stored_request.uuid, "--by", "Bob")

    trace = await trace_of(worker_settings, stored_request)
    text = (await command(worker_settings, "trace", stored_request.uuid)).text

    assert [(action.action, action.operator) for action in trace.actions] == [
        ("emails cancel", "Ada"),
        ("emails resend", "Bob"),
    ]
    lines = [line.split(maxsplit=3) for line in text.splitlines()[4:]]
    said = [(" ".join(words[:2]), words[3]) for words in lines if words[0] == "emails"]
    assert said == [
        ("emails cancel", f"{key}, by Ada: a test of the firm"),
        ("emails resend", f"{key}.2, by Bob"),
    ]
    assert [words[2] for words in lines if words[0] == "e-mail"] == [
        "request.created.1,",
        "request.created.1.2,",
    ]


@pytest.mark.usefixtures("channel")
async def test_erased_request_is_still_shown(worker_settings, database, stored_request):
    await calculate(database, stored_request)
    before = await trace_of(worker_settings, stored_request)

    await command(worker_settings, "request", "erase", stored_request.uuid, "--by", "Ada")

    trace = await trace_of(worker_settings, stored_request)
    assert trace.conclusion == "The request was erased."
    assert trace.erased_at is not None
    assert (trace.tenant, trace.stored_at) == (before.tenant, before.stored_at)
    assert (trace.calculation_id, trace.calculated_at) == (before.calculation_id, before.calculated_at)
    assert states(trace) == [*states(before), ("request.email_failed", 3, "pending")]
    assert [(email.state, email.reason) for email in trace.emails] == [("failed", "cancelled")]
    assert [(action.action, action.operator) for action in trace.actions] == [("request erase", "Ada")]
