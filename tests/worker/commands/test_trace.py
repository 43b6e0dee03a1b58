"""`trace`: the progress of one request."""

import re

import pytest

from service.calculation_requests.model import CalculationRequest
from tests.worker.commands.conftest import command, rendered
from tests.worker.commands.steps import attempt_emails, calculate, intend, key_of
from tests.worker.conftest import KEYS
from worker.commands.trace import Trace

pytestmark = pytest.mark.usefixtures("on_servers")


async def trace_of(request: CalculationRequest) -> tuple[Trace, list[list[str]]]:
    """Return the answer of `trace`, which must contain no personal data and no secret, and its table."""
    answer = await command("trace", request.uuid)
    said = rendered(answer)
    assert "@" not in said
    assert request.secret_and_url(KEYS, "")[0] not in said
    assert request.customer_last_name not in said
    uuid, conclusion, _, *lines = answer.text.splitlines()
    assert (uuid, conclusion) == (request.uuid, answer.data.conclusion)
    headings, *rows = [re.split(" {2,}", line) for line in lines]
    assert headings == ["what", "when", "state"]
    return answer.data, rows


def states(trace: Trace) -> list[tuple[str, int, str]]:
    """Return the state of each event."""
    return [(event.type, event.sequence, event.state) for event in trace.events]


async def test_new_request_is_pending_and_then_published_without_an_email(database, stored_request):
    pending, _ = await trace_of(stored_request)
    await database.execute("DELETE FROM outbox")

    published, _ = await trace_of(stored_request)

    assert states(pending) == [("request.created", 1, "pending")]
    assert (pending.tenant, pending.stored_at) == (stored_request.conveyancer_id, stored_request.created_at)
    assert pending.calculated_at is None
    assert pending.conclusion == "request.created has not been published: it is pending."
    assert states(published) == [("request.created", 1, "published")]
    assert published.emails == []
    assert published.conclusion.startswith("request.created was published, but there is no e-mail yet")


async def test_held_event_is_shown_with_its_error(retrying):
    trace, [_, (_, _, said), _] = await trace_of(retrying)

    assert states(trace) == [("request.created", 1, "retrying"), ("request.email_sent", 2, "waiting")]
    assert said.startswith("event 1, retrying after 3 attempts, next at 20")
    assert said.endswith(": returned: no queue is bound for it")


@pytest.mark.parametrize(
    ("code", "state", "conclusion"),
    [
        ("451 4.7.1", "pending", "The mail server has not accepted the e-mail yet."),
        ("550 5.1.1", "failed", "The e-mail has failed: refused."),
    ],
)
async def test_unsent_email_is_shown_with_the_reply_of_the_mail_server_but_no_address(
    database, postman, mail_server, stored_request, code, state, conclusion
):
    mail_server.rcpt_reply = f"{code} <ada@customer.example.com>: no"
    await intend(database, stored_request)
    await attempt_emails(database, postman)

    trace, _ = await trace_of(stored_request)

    [email] = trace.emails
    assert (email.state, email.server_reply) == (state, f"{code} <[address]>: no")
    assert email.attempts >= 1
    assert (email.next_attempt_at is not None) is (state == "pending")
    assert trace.conclusion == conclusion


async def test_finished_request_is_shown_with_every_step_in_the_order_of_time(
    database, postman, stored_request
):
    await intend(database, stored_request)
    await attempt_emails(database, postman)
    before, _ = await trace_of(stored_request)
    await calculate(database, stored_request)
    await database.execute("UPDATE recorded_event SET at = at + interval '1 h' WHERE sequence = 3")
    await database.execute("DELETE FROM outbox")

    trace, rows = await trace_of(stored_request)

    assert before.conclusion == "The mail server has accepted the e-mail. There is no calculation yet."
    assert states(trace) == [
        ("request.created", 1, "published"),
        ("request.email_sent", 2, "published"),
        ("request.calculated", 3, "published"),
    ]
    assert [(email.state, email.server_reply) for email in trace.emails] == [("sent", "OK accepted")]
    assert trace.calculation_id == "C-1"
    assert trace.calculated_at is not None
    assert trace.conclusion == "The request has its calculation."
    assert [what for what, *_ in rows] == [
        *("stored", "request.created", "request.email_sent", "e-mail", "request.calculated", "calculation"),
    ]


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

    trace, rows = await trace_of(stored_request)

    assert trace.conclusion == "The mail server has not accepted the e-mail yet.", "the last e-mail counts"
    assert [(what, state) for what, _, state in rows if what.startswith("emails")] == [
        ("emails cancel", f"{key_of(stored_request)}, by Ada: a test of the firm"),
        ("emails resend", f"{key_of(stored_request, 2)}, by Bob"),
    ]
    assert [state.split(",")[0] for what, _, state in rows if what == "e-mail"] == [
        "request.created.1",
        "request.created.1.2",
    ]


async def test_erased_request_is_still_shown(database, stored_request):
    await calculate(database, stored_request)
    await database.execute("DELETE FROM outbox WHERE sequence = 1")
    before, _ = await trace_of(stored_request)

    await command("request", "erase", stored_request.uuid, "--by", "Ada")

    trace, _ = await trace_of(stored_request)
    assert trace.conclusion == "The request was erased."
    assert trace.erased_at is not None
    assert (trace.tenant, trace.stored_at) == (before.tenant, before.stored_at)
    assert (trace.calculation_id, trace.calculated_at) == (before.calculation_id, before.calculated_at)
    assert states(trace) == [*states(before), ("request.email_failed", 3, "pending")]
    assert [(email.state, email.reason) for email in trace.emails] == [("failed", "cancelled")]
    assert [(action.action, action.operator) for action in trace.actions] == [("request erase", "Ada")]
