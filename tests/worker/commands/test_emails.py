"""`emails list|resend|cancel`: e-mails are shown, sent again and stopped, and withdrawn requests get none."""

from datetime import UTC, datetime, timedelta

import pytest

from service.calculation_requests import erasing
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import AlreadyErased, AlreadyWithdrawn, RequestNotFound
from service.identifiers import new_request_id, uuid_of
from tests.harness.examples import CONVEYANCER, FREE_CONVEYANCER
from tests.worker import steps
from tests.worker.commands.conftest import command
from tests.worker.conftest import created_event, store

pytestmark = pytest.mark.usefixtures("on_servers")


async def changed(*words: str) -> int:
    answer = await command("emails", *words)
    number = int(answer.text.split()[0])
    assert answer.data == {"emails": number}
    return number


async def test_failed_email_is_sent_again_as_a_new_one_each_time(database, postman, mail_server, refused):
    for _ in range(9):
        await changed("resend", "--uuid", refused.uuid)
        await steps.attempt_emails(database, postman)
    mail_server.rcpt_reply = "250 OK"

    done = await changed("resend", "--reply", "550")
    await steps.attempt_emails(database, postman)
    by_one_who_had_found_the_tenth = await steps.add_email(database, refused, 11)

    assert (done, by_one_who_had_found_the_tenth) == (1, [])
    failed = {steps.key_of(refused, number): "failed" for number in range(1, 11)}
    assert await steps.states(database) == failed | {steps.key_of(refused, 11): "sent"}
    (mail,) = mail_server.accepted
    assert mail.message["Message-ID"].strip().startswith(f"<{steps.key_of(refused, 11)}.")
    await steps.assert_sound(database)


async def test_sent_or_cancelled_email_is_sent_again_only_for_a_named_request(database, postman, intended):
    await steps.attempt_emails(database, postman)
    cancelled = await store(database)
    await changed("cancel", "--uuid", cancelled.uuid)

    unnamed = await changed("resend", "--from", "2026-01-01")
    failed_only = await changed("resend", "--uuid", intended.uuid)
    named = await changed("resend", "--uuid", cancelled.uuid)
    listed = await command("emails", "list", "--uuid", cancelled.uuid)
    sent = await changed("resend", "--uuid", intended.uuid, "--sent")

    assert (unnamed, failed_only, named, sent) == (0, 0, 1, 1)
    states = await steps.states(database)
    assert states[steps.key_of(intended, 2)] == states[steps.key_of(cancelled, 2)] == "pending"
    assert [line.split()[:7] for line in listed.text.splitlines()] == [
        ["uuid", "number", "kind", "conveyancer", "requested_by", "state", "reason"],
        [cancelled.uuid, "2", "invitation", CONVEYANCER, "-", "pending", "-"],
        [cancelled.uuid, "1", "invitation", CONVEYANCER, "-", "failed", "cancelled"],
    ]
    for words, numbers in {"--limit 1": [2], "--state failed": [1], "--state sent": [1]}.items():
        assert [each["number"] for each in (await command("emails", "list", *words.split())).data] == numbers


async def test_emails_of_one_firm_are_stopped_at_once_and_no_others(database, pool, postman, mail_server):
    """In two batches. Some are pending, and the request.created of others is on its way to the consumer."""
    *stolen, other = await steps.store_many(database, 211)
    await database.execute(
        "UPDATE calculation_request SET conveyancer_id = $2 WHERE id = $1", other.id, FREE_CONVEYANCER
    )
    for request in stolen[:2]:
        await steps.intend(database, request)

    done = await changed("cancel", "--conveyancer", CONVEYANCER, "--from", "2026-01-01")
    for request in (*stolen[:4], other):
        await steps.intend_email(created_event(request), pool=pool)
    await steps.attempt_emails(database, postman)

    assert done == await database.fetchval("SELECT count(*) FROM operator_action") == 210
    assert [mail.recipients for mail in mail_server.accepted] == [[other.customer_email]]
    failed = {steps.key_of(request): "failed" for request in stolen}
    assert await steps.states(database) == failed | {steps.key_of(other): "sent"}
    reasons = await database.fetch("SELECT DISTINCT reason, attempts FROM email WHERE state = 'failed'")
    assert reasons == [("cancelled", 0)]
    await steps.assert_sound(database)


async def test_resend_is_aimed_by_time_and_reply_tried_on_a_few_and_stopped(database, postman, mail_server):
    for reply in ("550 5.1.1 no such user", "550 5.7.1 blocked"):
        mail_server.rcpt_reply = reply
        for request in await steps.store_many(database, 3):
            await steps.intend(database, request)
        await steps.attempt_emails(database, postman)
    regular = await store(database)
    await steps.intend(database, regular)
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    numbers = {"--from 2026-01-01": 6, f"--from {tomorrow:%Y-%m-%d}": 0, "--reply 550 --from 2026-01-01": 6}
    numbers |= {"--reply 551": 0, "--reply 5.7.1": 3}

    async def unresolved(words: str) -> int:
        return len((await command("emails", "list", "--unresolved", *words.split())).data)

    before = {words: await unresolved(words) for words in numbers}
    none = await changed("resend", "--reply", "551")
    tried = await changed("resend", "--reply", "5.7.1", "--limit", "2")
    left = [await unresolved(words) for words in ("--from 2026-01-01", "--reply 5.7.1")]
    stopped = await changed("cancel", "--resent", "--from", "2026-01-01")
    async with database.transaction():
        await erasing.erase(database, [request.id])  # the one that is left with 5.7.1
    erased = await changed("resend", "--reply", "5.7.1")

    assert before == numbers
    assert (none, tried, left, stopped, erased) == (0, 2, [4, 1], 2, 0)
    assert await steps.add_email(database, request, 2) == []
    assert (await steps.states(database))[steps.key_of(regular)] == "pending"


async def test_command_that_changes_nothing_says_why_and_what_to_do(database, postman):
    sent, erased = await store(database), await store(database)
    await steps.intend(database, sent)
    await steps.attempt_emails(database, postman)
    await command("request", "erase", erased.uuid)
    new = await store(database)

    errors: dict[type[Exception], tuple[str, ...]] = {
        RequestNotFound: ("--uuid", uuid_of(new_request_id())),
        AlreadyErased: ("--uuid", erased.uuid),
        UnknownConveyancer: ("--conveyancer", "acme"),
    }
    for error, words in errors.items():
        for action in ("resend", "cancel"):
            with pytest.raises(error):
                await command("emails", action, *words)
    answers: dict[str, tuple[str, ...]] = {
        f"--uuid {sent.uuid} --sent` sends it again": ("resend", "--uuid", sent.uuid),
        "number 1, was sent": ("cancel", "--uuid", sent.uuid),
        "number 1, is pending": ("resend", "--uuid", new.uuid),
        "`python -m worker emails list` shows": ("resend", "--conveyancer", CONVEYANCER),
    }
    for part, words in answers.items():
        answer = await command("emails", *words)
        assert (answer.status, answer.data, part in answer.text) == (1, {"emails": 0}, True)
    for listing in (("emails", "list"), ("request", "find")):
        with pytest.raises(UnknownConveyancer):
            await command(*listing, "--conveyancer", "acme")


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_customer_of_a_withdrawn_request_gets_no_email_but_its_calculation_is_recorded(
    *, client, database, pool, postman, mail_server, stored_request, is_recorded
):
    """Its request.created may still be on its way."""
    if is_recorded:
        await steps.intend(database, stored_request)
    assert (await client.post(f"/v1/request/{stored_request.uuid}/withdrawal")).status_code == 200
    await steps.intend_email(created_event(stored_request), pool=pool)
    for words in (
        ("request", "correct", stored_request.uuid, "--customer-email", "eve@example.com"),
        ("request", "new-secret", stored_request.uuid),
        ("emails", "resend", "--sent", "--uuid", stored_request.uuid),
    ):
        with pytest.raises(AlreadyWithdrawn):
            await command(*words)
    too_late = await steps.add_email(database, stored_request, 2)
    await steps.attempt_emails(database, postman)
    events = [row[0] for row in await database.fetch("SELECT type FROM event ORDER BY sequence")]
    await steps.calculate(database, stored_request.uuid)
    unresolved = (await command("emails", "list", "--unresolved")).data
    (found,) = (await command("request", "find", "--case-ref", stored_request.case_ref)).data
    traced = (await command("trace", stored_request.uuid)).data["request"]

    assert (mail_server.accepted, too_late, unresolved) == ([], [], [])
    assert await steps.states(database) == {steps.key_of(stored_request): "failed"}
    assert events == ["request.created", "request.withdrawn", "request.email_failed"]
    assert (traced["calculation_id"], traced["withdrawn_at"]) == ("C-1", found["withdrawn_at"])
    assert found["withdrawn_at"] is not None
    await steps.assert_sound(database)
