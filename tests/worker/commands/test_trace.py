"""`trace`: the progress of one request."""

from typing import Any

import pytest

from service.calculation_requests.model import CalculationRequest
from tests.harness.stored import KEYS
from tests.worker.commands.conftest import command, rendered
from tests.worker.steps import attempt_emails, calculate, finish, key_of
from worker.consumers.calculations import CalculationAlreadyRecorded

pytestmark = pytest.mark.usefixtures("on_servers")


async def trace_of(request: CalculationRequest) -> dict[str, Any]:
    """Return the answer of `trace`, which must contain no personal data and no secret."""
    answer = await command("trace", request.uuid)
    said = rendered(answer)
    assert "@" not in said
    assert request.secret_and_url(KEYS, "")[0] not in said
    assert request.customer_last_name not in said
    assert answer.text.splitlines()[2].startswith(request.uuid)
    trace: dict[str, Any] = answer.data
    return trace


def states(trace: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(event["type"], event["sequence"], event["state"]) for event in trace["events"]]


async def test_new_request_is_pending_and_then_published_without_an_email(database, stored_request):
    pending = await trace_of(stored_request)
    await database.execute("DELETE FROM outbox")

    published = await trace_of(stored_request)

    assert states(pending) == [("request.created", 1, "pending")]
    assert pending["request"]["tenant"] == stored_request.conveyancer_id
    assert pending["request"]["stored_at"] == stored_request.created_at
    assert pending["request"]["calculation_id"] is None
    assert states(published) == [("request.created", 1, "published")]
    assert published["emails"] == []


async def test_held_event_is_shown_with_its_error(retrying):
    trace = await trace_of(retrying)

    assert states(trace) == [("request.created", 1, "retrying"), ("request.email_sent", 2, "waiting")]
    first, _ = trace["events"]
    assert (first["attempts"], first["last_error"]) == (3, "returned: no queue is bound for it")
    assert first["next_attempt_at"] is not None


@pytest.mark.parametrize(
    ("code", "state", "reason"), [("451 4.7.1", "pending", None), ("550 5.1.1", "failed", "refused")]
)
async def test_unsent_email_is_shown_with_the_reply_of_the_mail_server_but_no_address(
    database, postman, mail_server, intended, code, state, reason
):
    mail_server.rcpt_reply = f"{code} <ada@customer.example.com>: no"
    await attempt_emails(database, postman)

    trace = await trace_of(intended)

    [email] = trace["emails"]
    assert (email["state"], email["reason"]) == (state, reason)
    assert email["server_reply"] == f"{code} <[address]>: no"
    assert email["attempts"] >= 1
    assert (email["next_attempt_at"] is not None) is (state == "pending")


async def test_finished_request_is_shown_with_every_step(database, postman, stored_request):
    await finish(database, postman, stored_request)
    await database.execute("DELETE FROM outbox")

    trace = await trace_of(stored_request)

    assert states(trace) == [
        ("request.created", 1, "published"),
        ("request.email_sent", 2, "published"),
        ("request.calculated", 3, "published"),
    ]
    assert [(email["state"], email["server_reply"]) for email in trace["emails"]] == [("sent", "OK accepted")]
    assert trace["request"]["calculation_id"] == "C-1"


async def test_refused_calculation_is_shown_and_the_latest_of_several(database, stored_request):
    await calculate(database, stored_request.uuid)
    for calculation_id in ("C-2", "C-3", "C-3"):
        with pytest.raises(CalculationAlreadyRecorded):
            await calculate(database, stored_request.uuid, calculation_id)
    traced = (await trace_of(stored_request))["request"]

    assert (traced["calculation_id"], traced["refused_calculation"]) == ("C-1", "C-3")


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

    assert [
        (each["action"], each["subject"], each["operator"], each["note"]) for each in trace["actions"]
    ] == [
        ("emails cancel", key_of(stored_request), "Ada", "a test of the firm"),
        ("emails resend", key_of(stored_request, 2), "Bob", None),
        ("outbox replay", "2 events", "Cy", None),
    ]
    emails = [
        (email["number"], email["kind"], email["requested_by"], email["state"]) for email in trace["emails"]
    ]
    assert emails == [(1, "invitation", None, "failed"), (2, "invitation", "crm", "pending")]


async def test_erased_request_is_still_shown(database, stored_request):
    await calculate(database, stored_request.uuid)
    await database.execute("DELETE FROM outbox WHERE sequence = 1")
    before = await trace_of(stored_request)

    await command("request", "erase", stored_request.uuid, "--by", "Ada")

    trace = await trace_of(stored_request)
    erased_at = trace["request"]["erased_at"]
    assert erased_at is not None
    assert trace["request"] == before["request"] | {"erased_at": erased_at}
    later = [("request.email_failed", 3, "pending"), ("request.erased", 4, "pending")]
    assert states(trace) == [*states(before), *later]
    [email] = trace["emails"]
    assert (email["state"], email["reason"]) == ("failed", "cancelled")
    assert email["conveyancer"] == stored_request.conveyancer_id
    assert [(action["action"], action["operator"]) for action in trace["actions"]] == [
        ("request erase", "Ada")
    ]
