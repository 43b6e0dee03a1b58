"""`emails list|resend|cancel`: e-mails are shown, sent again and stopped while a postman runs."""

from datetime import UTC, datetime, timedelta

import pytest

from service.calculation_requests import erasing
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import AlreadyErased, RequestNotFound
from service.identifiers import new_request_id, uuid_of
from tests.harness.examples import CONVEYANCER, FREE_CONVEYANCER
from tests.worker.commands.conftest import command
from tests.worker.conftest import created_event, store
from tests.worker.steps import (
    add_email,
    assert_sound,
    attempt_emails,
    intend,
    intend_email,
    key_of,
    states,
    store_many,
)

pytestmark = pytest.mark.usefixtures("on_servers")

LATER = (datetime.now(UTC) + timedelta(days=1)).isoformat()


async def changed(*words: str) -> int:
    answer = await command("emails", *words)
    number = int(answer.text.split()[0])
    assert answer.data == {"emails": number}
    return number


async def test_failed_email_is_sent_again_as_a_new_one_each_time(database, postman, mail_server, refused):
    for _ in range(9):
        await changed("resend", "--uuid", refused.uuid)
        await attempt_emails(database, postman)
    mail_server.rcpt_reply = "250 OK"

    done = await changed("resend", "--reply", "550")
    await attempt_emails(database, postman)

    by_one_who_had_found_the_tenth = await add_email(database, refused, 11)

    failed = {key_of(refused, number): "failed" for number in range(1, 11)}
    assert (done, by_one_who_had_found_the_tenth) == (1, [])
    assert await states(database) == failed | {key_of(refused, 11): "sent"}
    (mail,) = mail_server.accepted
    assert mail.message["Message-ID"].strip().startswith(f"<{key_of(refused, 11)}.")
    await assert_sound(database)


async def test_sent_or_cancelled_email_is_sent_again_only_for_a_request_that_is_named(
    database, postman, intended
):
    await attempt_emails(database, postman)
    cancelled = await store(database)
    await changed("cancel", "--uuid", cancelled.uuid)

    unnamed = await changed("resend", "--from", "2026-01-01")
    failed_only = await changed("resend", "--uuid", intended.uuid)
    named = await changed("resend", "--uuid", cancelled.uuid)
    sent = await changed("resend", "--uuid", intended.uuid, "--sent")

    assert (unnamed, failed_only, named, sent) == (0, 0, 1, 1)
    pending = {key_of(intended, 2): "pending", key_of(cancelled, 2): "pending"}
    assert pending.items() <= (await states(database)).items()


async def test_emails_of_one_firm_are_stopped_at_once_and_no_others(database, pool, postman, mail_server):
    """Some are pending, and the request.created of others is still on its way to the consumer."""
    stolen = [await store(database) for _ in range(4)]
    other = await store(database)
    await database.execute(
        "UPDATE calculation_request SET conveyancer_id = $2 WHERE id = $1", other.id, FREE_CONVEYANCER
    )
    for request in stolen[:2]:
        await intend(database, request)

    done = await changed("cancel", "--conveyancer", CONVEYANCER, "--from", "2026-01-01")
    for request in (*stolen, other):
        await intend_email(created_event(request), pool=pool)
    await attempt_emails(database, postman)

    assert done == 4
    assert [mail.recipients for mail in mail_server.accepted] == [[other.customer_email]]
    assert await states(database) == {
        **{key_of(request): "failed" for request in stolen},
        key_of(other): "sent",
    }
    reasons = await database.fetch("SELECT DISTINCT reason, attempts FROM email WHERE state = 'failed'")
    assert reasons == [("cancelled", 0)]
    await assert_sound(database)


async def test_resend_is_aimed_by_time_code_and_reply_tried_on_a_few_and_stopped(
    database, postman, mail_server
):
    for reply in ("550 5.1.1 no such user", "550 5.7.1 blocked"):
        mail_server.rcpt_reply = reply
        for _ in range(3):
            await intend(database, await store(database))
        await attempt_emails(database, postman)
    regular = await store(database)
    await intend(database, regular)
    numbers = {
        "--from 2026-01-01": 6,
        f"--from {LATER}": 0,
        "--reply 550 --from 2026-01-01": 6,
        "--reply 551": 0,
        "--reply 5.7.1": 3,
    }

    async def unresolved() -> dict[str, int]:
        lists = {words: await command("emails", "list", "--unresolved", *words.split()) for words in numbers}
        return {words: len(answer.data) for words, answer in lists.items()}

    before = await unresolved()
    none = await changed("resend", "--reply", "551")
    tried = await changed("resend", "--reply", "5.7.1", "--limit", "2")
    left = await unresolved()
    stopped = await changed("cancel", "--resent", "--from", "2026-01-01")

    assert before == numbers
    assert (none, tried, left["--from 2026-01-01"], left["--reply 5.7.1"], stopped) == (0, 2, 4, 1, 2)
    assert (await states(database))[key_of(regular)] == "pending"


async def test_list_begins_with_the_newest_and_says_why_emails_failed(stored_request):
    await changed("cancel", "--uuid", stored_request.uuid)
    await changed("resend", "--uuid", stored_request.uuid)

    answer = await command("emails", "list")
    chosen = [
        [email["number"] for email in (await command("emails", "list", *words)).data]
        for words in (("--limit", "1"), ("--state", "failed"), ("--state", "sent"))
    ]

    assert [line.split()[:7] for line in answer.text.splitlines()] == [
        ["uuid", "number", "kind", "conveyancer", "requested_by", "state", "reason"],
        [stored_request.uuid, "2", "invitation", CONVEYANCER, "-", "pending", "-"],
        [stored_request.uuid, "1", "invitation", CONVEYANCER, "-", "failed", "cancelled"],
    ]
    assert chosen == [[2], [1], []]


async def test_email_of_an_erased_request_is_not_sent_again(database, refused):
    async with database.transaction():
        await erasing.erase(database, [refused.id])

    by_code = await changed("resend", "--reply", "550")
    by_one_who_had_found_it = await add_email(database, refused, 2)

    assert (by_code, by_one_who_had_found_it) == (0, [])
    assert await states(database) == {key_of(refused): "failed"}


async def test_command_that_changes_nothing_says_why_and_what_to_do(database, postman):
    unknown, sent, erased = new_request_id(), await store(database), await store(database)
    await intend(database, sent)
    await attempt_emails(database, postman)
    await command("request", "erase", erased.uuid)
    new = await store(database)

    errors: dict[type[Exception], tuple[str, ...]] = {
        RequestNotFound: ("--uuid", uuid_of(unknown)),
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
        assert (answer.status, answer.data) == (1, {"emails": 0})
        assert part in answer.text
    for listing in (("emails", "list"), ("request", "find")):
        with pytest.raises(UnknownConveyancer):
            await command(*listing, "--conveyancer", "acme")


async def test_many_emails_are_changed_batch_by_batch(database):
    await store_many(database, 450)

    done = await changed("cancel", "--conveyancer", CONVEYANCER)

    assert done == 450
    assert await database.fetchval("SELECT count(*) FROM email WHERE reason = 'cancelled'") == 450
    assert await database.fetchval("SELECT count(*) FROM operator_action") == 450
