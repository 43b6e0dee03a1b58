"""`emails list|resend|cancel`: e-mails are shown, sent again and stopped while a postman runs."""

import asyncio
from datetime import UTC, datetime, timedelta

from service.every_firm import email_changes, erasing
from service.postgres.pool import Connection
from tests.harness.examples import CONVEYANCER, FREE_CONVEYANCER
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import command, rendered
from tests.worker.commands.steps import (
    assert_sound,
    attempt_emails,
    intend,
    key_of,
    refuse_email,
    states,
    store_many,
)
from tests.worker.conftest import store
from worker.consumers import notifications
from worker.settings import WorkerSettings

LATER = (datetime.now(UTC) + timedelta(days=1)).isoformat()


async def changed(settings: WorkerSettings, *words: str) -> int:
    """Return how many e-mails `emails resend` or `cancel` changed."""
    answer = await command(settings, "emails", *words)
    number = int(answer.text.split()[0])
    assert answer.data == {"emails": number}
    return number


async def actions(database: Connection) -> list[tuple[str, str, str | None]]:
    """Return the changes on record."""
    rows = await database.fetch("SELECT action, operator, note FROM operator_action ORDER BY id")
    return [tuple(row) for row in rows]


async def test_failed_email_is_sent_again_as_a_new_one(
    worker_settings, database, postman, mail_server, stored_request
):
    await refuse_email(database, postman, mail_server, stored_request)
    mail_server.rcpt_reply = "250 OK"

    done = await changed(
        worker_settings, "resend", "--code", "550", "--by", "Ada", "--note", "mailbox is back"
    )
    async with running(postman.run):
        await eventually(lambda: mail_server.accepted)
        await eventually(lambda: database.fetchval("SELECT bool_and(settled_at IS NOT NULL) FROM email"))

    assert done == 1
    assert await states(database) == {key_of(stored_request): "failed", key_of(stored_request, 2): "sent"}
    (mail,) = mail_server.accepted
    assert mail.message["Message-ID"] == f"<{key_of(stored_request, 2)}@service.example.com>"
    assert await actions(database) == [("emails resend", "Ada", "mailbox is back")]
    await assert_sound(database)


async def test_email_that_failed_again_is_sent_a_third_time(
    worker_settings, database, postman, mail_server, stored_request
):
    await refuse_email(database, postman, mail_server, stored_request)
    for _ in range(10):
        await changed(worker_settings, "resend", "--uuid", stored_request.uuid)
        await attempt_emails(database, postman)

    assert await states(database) == {key_of(stored_request, number + 1): "failed" for number in range(11)}
    await assert_sound(database)


async def test_sent_email_is_sent_again_only_for_a_request_that_is_named(
    worker_settings, database, postman, stored_request
):
    await intend(database, stored_request)
    await attempt_emails(database, postman)

    unnamed = await changed(worker_settings, "resend", "--from", "2026-01-01")
    failed_only = await changed(worker_settings, "resend", "--uuid", stored_request.uuid)
    named = await changed(worker_settings, "resend", "--uuid", stored_request.uuid, "--sent")

    assert (unnamed, failed_only, named) == (0, 0, 1)
    assert list((await states(database)).values()) == ["sent", "pending"]


async def test_emails_of_one_firm_are_stopped_at_once_and_no_others(
    worker_settings, database, pool, postman, relay, mail_server
):
    """Some are pending, and the request.created of others is still on its way to the consumer."""
    stolen = [await store(database) for _ in range(4)]
    other = await store(database)
    await database.execute(
        "UPDATE calculation_request SET conveyancer_id = $2 WHERE id = $1", other.id, FREE_CONVEYANCER
    )
    for request in stolen[:2]:
        await intend(database, request)

    done = await changed(worker_settings, "cancel", "--conveyancer", CONVEYANCER, "--from", "2026-01-01")
    notified = notifications.consumer(worker_settings, pool, asyncio.Event())
    async with running(relay.run, notified.run, postman.run):
        await eventually(lambda: mail_server.accepted)
        await eventually(lambda: database.fetchval("SELECT count(*) = 0 FROM outbox"))

    assert done == 4
    assert [mail.recipients for mail in mail_server.accepted] == [[other.customer_email]]
    assert await states(database) == {
        **{key_of(request): "failed" for request in stolen},
        key_of(other): "sent",
    }
    reasons = await database.fetch("SELECT DISTINCT reason, attempts FROM email WHERE state = 'failed'")
    assert reasons == [("cancelled", 0)]
    await assert_sound(database)


async def test_time_and_code_choose_the_emails(worker_settings, database, postman, mail_server):
    for _ in range(2):
        await intend(database, await store(database))
    await refuse_email(database, postman, mail_server, await store(database))
    numbers = {
        "--from 2026-01-01": 3,
        f"--from {LATER}": 0,
        "--from 2026-01-01 --to 2026-01-02": 0,
        f"--to {LATER} --code 550": 3,
        "--code 551": 0,
    }

    planned = {
        words: await changed(worker_settings, "resend", "--dry-run", *words.split()) for words in numbers
    }

    assert planned == numbers


async def test_resend_is_aimed_by_the_reply_tried_on_a_few_and_stopped(
    worker_settings, database, postman, mail_server
):
    for reply in ("550 5.1.1 no such user", "550 5.7.1 blocked"):
        mail_server.rcpt_reply = reply
        for _ in range(3):
            await intend(database, await store(database))
        await attempt_emails(database, postman)
    regular = await store(database)
    await intend(database, regular)

    tried = await changed(worker_settings, "resend", "--reply", "5.7.1", "--limit", "2")
    left = (await command(worker_settings, "emails", "list", "--unresolved")).text
    stopped = await changed(worker_settings, "cancel", "--resent", "--from", "2026-01-01")

    assert (tried, stopped) == (2, 2)
    assert (left.count("5.1.1"), left.count("5.7.1"), left.count("\n")) == (3, 1, 4)
    assert (await states(database))[key_of(regular)] == "pending"


async def test_email_that_was_cancelled_is_sent_again_only_for_a_request_that_is_named(
    worker_settings, database, stored_request
):
    async with database.transaction():
        await email_changes.cancel(database, [stored_request.id])

    by_time = await changed(worker_settings, "resend", "--from", "2026-01-01")
    by_name = await changed(worker_settings, "resend", "--uuid", stored_request.uuid)

    assert (by_time, by_name) == (0, 1)
    assert (await states(database))[key_of(stored_request, 2)] == "pending"


async def test_list_begins_with_the_newest_and_says_why_emails_failed(
    worker_settings, database, stored_request
):
    async with database.transaction():
        await email_changes.cancel(database, [stored_request.id])
    await email_changes.add_again(database, {key_of(stored_request): stored_request.id})

    answer = await command(worker_settings, "emails", "list")
    newest = await command(worker_settings, "emails", "list", "--limit", "1")

    assert [line.split()[:3] for line in answer.text.splitlines()] == [
        ["key", "state", "reason"],
        [key_of(stored_request, 2), "pending", "-"],
        [key_of(stored_request), "failed", "cancelled"],
    ]
    assert key_of(stored_request, 2) in newest.text


async def test_email_of_an_erased_request_is_not_sent_again(
    worker_settings, database, postman, mail_server, stored_request
):
    await refuse_email(database, postman, mail_server, stored_request)
    async with database.transaction():
        await erasing.erase(database, [stored_request.id])

    by_code = await changed(worker_settings, "resend", "--code", "550")
    by_one_who_had_found_it = await email_changes.add_again(
        database, {key_of(stored_request): stored_request.id}
    )

    assert (by_code, by_one_who_had_found_it) == (0, {})
    assert await states(database) == {key_of(stored_request): "failed"}


async def test_many_emails_are_changed_batch_by_batch(worker_settings, database):
    await store_many(database, 450)

    done = await changed(worker_settings, "cancel", "--conveyancer", CONVEYANCER)

    assert done == 450
    assert await database.fetchval("SELECT count(*) FROM email WHERE reason = 'cancelled'") == 450
    assert len(await actions(database)) == 450


async def test_listed_replies_show_no_address(
    worker_settings, database, postman, mail_server, stored_request
):
    mail_server.rcpt_reply = "550 5.1.1 <ada@customer.example.com> is unknown"
    await intend(database, stored_request)
    await attempt_emails(database, postman)

    answer = await command(worker_settings, "emails", "list", "--state", "failed", "--code", "550")
    sent = await command(worker_settings, "emails", "list", "--state", "sent")

    assert key_of(stored_request) in answer.text
    assert "550 5.1.1 <[address]> is unknown" in answer.text
    assert "@" not in rendered(answer)
    assert (sent.data, sent.text) == ([], "none")
