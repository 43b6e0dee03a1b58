"""`emails list|retry|resend`: e-mails are shown, made due and sent again while a postman runs."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from service.calculation_requests.model import CalculationRequest, RequestErased, RequestNotFound
from service.operations import emails, erasing
from service.postgres.outages import OUTAGE_ERRORS, PostgresUnavailable
from service.postgres.pool import Connection
from tests.harness.in_process import running
from tests.harness.mail_server import MailServer
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with, store
from tests.worker.operating.steps import attempt_emails, intend, refuse_email
from tests.worker.operating.test_commands import command
from worker import reconciliation
from worker.mail.postman import Postman
from worker.operating.arguments import InvalidArgument
from worker.operating.emails import Changed
from worker.reconciliation import Limits
from worker.settings import WorkerSettings

LATER = (datetime.now(UTC) + timedelta(days=1)).isoformat()


def key_of(request: CalculationRequest, number: int = 1) -> str:
    """Return the key of an e-mail of a request, of which there may be several."""
    first = f"{request.uuid}.request.created.1"
    return first if number == 1 else f"{first}.{number}"


async def changed(settings: WorkerSettings, *words: str) -> Changed:
    """Return the answer of `emails retry` or `resend`."""
    answer = await command(settings, "emails", *words)
    assert isinstance(answer.data, Changed)
    noun = "e-mail" if answer.data.emails == 1 else "e-mails"
    assert answer.text.startswith(f"{answer.data.emails} {noun} ")
    return answer.data


async def states(database: Connection) -> dict[str, str]:
    """Return the state of each e-mail, by its key."""
    return dict(await database.fetch("SELECT event_id, state FROM email ORDER BY event_id"))


async def actions(database: Connection) -> list[tuple[str, str, str | None]]:
    """Return the changes on record."""
    rows = await database.fetch("SELECT action, operator, reason FROM operator_action ORDER BY id")
    return [tuple(row) for row in rows]


async def assert_sound(database: Connection) -> None:
    """Check that requests, events and e-mails add up."""
    async with database.transaction(isolation="repeatable_read", readonly=True):
        anomalies = await reconciliation.find_anomalies(database, Limits())
    assert [anomaly.name for anomaly in anomalies if anomaly.count] == []


async def test_failed_email_is_sent_again_as_a_new_one(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    await refuse_email(database, postman, mail_server, stored_request)
    mail_server.rcpt_reply = "250 OK"

    done = await changed(
        worker_settings, "resend", "--code", "550", "--by", "Ada", "--reason", "mailbox is back"
    )
    async with running(postman.run):
        await eventually(lambda: mail_server.accepted)
        await eventually(lambda: database.fetchval("SELECT bool_and(settled_at IS NOT NULL) FROM email"))

    assert done == Changed(dry_run=False, emails=1, keys=[key_of(stored_request, 2)])
    assert await states(database) == {key_of(stored_request): "failed", key_of(stored_request, 2): "sent"}
    (mail,) = mail_server.accepted
    assert mail.message["Message-ID"] == f"<{key_of(stored_request, 2)}@service.example.com>"
    assert await actions(database) == [("emails resend", "Ada", "mailbox is back")]
    await assert_sound(database)


async def test_resend_repeated_adds_nothing_while_the_email_is_pending(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    await refuse_email(database, postman, mail_server, stored_request)

    numbers = [(await changed(worker_settings, "resend", "--code", "550")).emails for _ in range(3)]

    assert numbers == [1, 0, 0]
    assert len(await states(database)) == 2
    assert len(await actions(database)) == 1


async def test_operators_who_resend_at_once_add_one_email(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    await refuse_email(database, postman, mail_server, stored_request)

    done = await asyncio.gather(*(changed(worker_settings, "resend", "--code", "550") for _ in range(4)))

    assert sum(each.emails for each in done) == 1
    assert len(await states(database)) == 2
    assert len(await actions(database)) == 1


async def test_email_that_another_operator_has_sent_again_meanwhile_is_not_sent_a_third_time(
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    await refuse_email(database, postman, mail_server, stored_request)
    first = {key_of(stored_request): stored_request.id}

    added = await emails.add_again(database, first)
    await attempt_emails(database, postman)
    added_late = await emails.add_again(database, first)

    assert (added, added_late) == ({stored_request.id: key_of(stored_request, 2)}, {})
    assert list((await states(database)).values()) == ["failed", "failed"]


@pytest.mark.parametrize("verb", ["retry", "resend"])
async def test_operator_who_vanished_holds_no_lock_for_long(
    worker_settings: WorkerSettings,
    database: Connection,
    postgres_link: TcpProxy,
    stored_request: CalculationRequest,
    *,
    verb: str,
) -> None:
    """For instance with its machine: TCP would notice after two hours."""
    await intend(database, stored_request)
    if verb == "retry":
        await database.execute("UPDATE email SET next_attempt_at = now() + interval '1 h'")
    else:
        await database.execute(
            "UPDATE email SET state = 'failed', reason = 'refused', settled_at = now() - interval '1 s'"
        )
    away = settings_with(worker_settings, database_url=postgres_link.url)
    postgres_link.hold_before(b"INSERT INTO operator_action")
    changing = asyncio.create_task(changed(away, verb, "--uuid", stored_request.uuid))
    await postgres_link.marker_reached.wait()
    locked = "email" if verb == "retry" else "calculation_request"

    async def is_free() -> bool:
        return bool(await database.fetch(f"SELECT FROM {locked} FOR UPDATE SKIP LOCKED"))

    was_free = await is_free()
    await eventually(is_free)
    await postgres_link.cut()

    assert not was_free
    with pytest.raises((*OUTAGE_ERRORS, PostgresUnavailable)):
        await changing
    assert len(await states(database)) == 1
    assert await actions(database) == []


async def test_email_that_failed_again_is_sent_a_third_time(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    await refuse_email(database, postman, mail_server, stored_request)
    for _ in range(10):
        await changed(worker_settings, "resend", "--uuid", stored_request.uuid)
        await attempt_emails(database, postman)

    assert await states(database) == {key_of(stored_request, number + 1): "failed" for number in range(11)}
    await assert_sound(database)


async def test_sent_email_is_sent_again_only_for_a_request_that_is_named(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    stored_request: CalculationRequest,
) -> None:
    await intend(database, stored_request)
    await attempt_emails(database, postman)

    with pytest.raises(InvalidArgument):
        await changed(worker_settings, "resend", "--sent", "--from", "2026-01-01")
    unnamed = await changed(worker_settings, "resend", "--from", "2026-01-01")
    failed_only = await changed(worker_settings, "resend", "--uuid", stored_request.uuid)
    named = await changed(worker_settings, "resend", "--uuid", stored_request.uuid, "--sent")

    assert [each.emails for each in (unnamed, failed_only, named)] == [0, 0, 1]
    assert list((await states(database)).values()) == ["sent", "pending"]


async def test_waiting_email_is_due_after_a_retry(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    mail_server.rcpt_reply = "450 4.2.1 try later"
    await intend(database, stored_request)
    await attempt_emails(database, postman)
    await database.execute("UPDATE email SET next_attempt_at = now() + interval '1 hour'")
    mail_server.rcpt_reply = "250 OK"

    of_another_code = await changed(worker_settings, "retry", "--code", "451")
    done = await changed(worker_settings, "retry", "--code", "450")
    again = await changed(worker_settings, "retry", "--code", "450")
    async with running(postman.run):
        await eventually(lambda: mail_server.accepted)

    assert [each.emails for each in (of_another_code, done, again)] == [0, 1, 0]
    assert [action for action, _, _ in await actions(database)] == ["emails retry"]


async def test_email_that_is_being_sent_is_left_alone(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    await intend(database, stored_request)
    await database.execute(
        "UPDATE email SET claimed_by = gen_random_uuid(), next_attempt_at = now() + interval '1 hour'"
    )

    for verb in ("retry", "resend"):
        assert (await changed(worker_settings, verb, "--uuid", stored_request.uuid)).emails == 0


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["--from", "2026-01-01"], 3),
        (["--from", LATER], 0),
        (["--from", "2026-01-01", "--to", "2026-01-02"], 0),
        (["--to", LATER, "--code", "550"], 3),
        (["--code", "551"], 0),
    ],
)
async def test_time_and_code_choose_the_emails(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    *,
    words: list[str],
    number: int,
) -> None:
    for _ in range(3):
        await intend(database, await store(database))
    mail_server.rcpt_reply = "550 5.1.1 no such user"
    await attempt_emails(database, postman)

    planned = await changed(worker_settings, "resend", "--dry-run", *words)
    unchanged = len(await states(database))
    done = await changed(worker_settings, "resend", *words)

    assert (planned.emails, unchanged, done.emails) == (number, 3, number)
    assert len(await states(database)) == 3 + number
    assert len(await actions(database)) == number


async def test_email_that_was_cancelled_is_sent_again_only_for_a_request_that_is_named(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    async with database.transaction():
        await emails.cancel_first(database, {key_of(stored_request): stored_request.id})

    by_time = await changed(worker_settings, "resend", "--from", "2026-01-01")
    by_name = await changed(worker_settings, "resend", "--uuid", stored_request.uuid)

    assert (by_time.emails, by_name.keys) == (0, [key_of(stored_request, 2)])


@pytest.mark.parametrize("verb", ["retry", "resend"])
async def test_emails_that_end_after_the_command_began_are_left_alone(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest, *, verb: str
) -> None:
    """Otherwise a page could find again what an earlier page sent, and what has failed since."""
    await intend(database, stored_request)
    pending = "UPDATE email SET created_at = now() + interval '1 h', next_attempt_at = now() + interval '2 h'"
    ended = "UPDATE email SET state = 'failed', reason = 'refused', settled_at = now() + interval '1 h'"
    await database.execute(pending if verb == "retry" else ended)

    by_default = await changed(worker_settings, verb, "--uuid", stored_request.uuid)
    on_demand = await changed(worker_settings, verb, "--uuid", stored_request.uuid, "--to", LATER)

    assert (by_default.emails, on_demand.emails) == (0, 1)


async def test_command_that_changes_nothing_of_a_request_says_why(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    words = ("emails", "resend", "--uuid")

    without_email = await command(worker_settings, *words, stored_request.uuid)
    await intend(database, stored_request)
    with_pending_email = await command(worker_settings, *words, stored_request.uuid)
    with pytest.raises(RequestNotFound):
        await command(worker_settings, *words, "req_0000000000000000000000")

    assert without_email.text == "0 e-mails due now. This request has had none yet."
    latest = f"The latest of this request, {key_of(stored_request)}, is pending."
    assert with_pending_email.text == f"0 e-mails due now. {latest}"


async def test_list_begins_with_the_newest_and_says_why_emails_failed(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    async with database.transaction():
        await emails.cancel_first(database, {key_of(stored_request): stored_request.id})
    await emails.add_again(database, {key_of(stored_request): stored_request.id})

    answer = await command(worker_settings, "emails", "list")
    newest = await command(worker_settings, "emails", "list", "--limit", "1")

    assert [line.split()[:3] for line in answer.text.splitlines()] == [
        ["e-mail", "state", "reason"],
        [key_of(stored_request, 2), "pending", "-"],
        [key_of(stored_request), "failed", "cancelled"],
    ]
    assert key_of(stored_request, 2) in newest.text


async def test_email_of_an_erased_request_is_not_sent_again(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    await refuse_email(database, postman, mail_server, stored_request)
    async with database.transaction():
        await erasing.erase(database, [stored_request.id])

    by_code = await changed(worker_settings, "resend", "--code", "550")
    by_one_who_had_found_it = await emails.add_again(database, {key_of(stored_request): stored_request.id})
    with pytest.raises(RequestErased):
        await changed(worker_settings, "resend", "--uuid", stored_request.uuid)

    assert (by_code.emails, by_one_who_had_found_it) == (0, {})
    assert await states(database) == {key_of(stored_request): "failed"}


async def test_many_emails_are_sent_again_page_by_page(
    worker_settings: WorkerSettings, database: Connection
) -> None:
    await store(database)
    await database.execute(
        """
        INSERT INTO calculation_request
        SELECT (jsonb_populate_record(request, jsonb_build_object('id', gen_random_uuid()))).*
          FROM calculation_request AS request, generate_series(2, 2500)
        """
    )
    await database.execute(
        """
        INSERT INTO email (event_id, request_id, state, reason, smtp_code, settled_at, event_sequence)
        SELECT id || '.request.created.1', id, 'failed', 'refused', 550, now() - interval '1 s', 2
          FROM calculation_request
        """
    )

    done = await changed(worker_settings, "resend", "--code", "550")

    assert (done.emails, len(done.keys)) == (2500, 10)
    assert await database.fetchval("SELECT count(*) FROM email WHERE state = 'pending'") == 2500
    assert len(await actions(database)) == 2500


async def test_listed_replies_show_no_address(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    mail_server.rcpt_reply = "550 5.1.1 <ada@customer.example.com> is unknown"
    await intend(database, stored_request)
    await attempt_emails(database, postman)

    answer = await command(worker_settings, "emails", "list", "--state", "failed", "--code", "550")
    sent = await command(worker_settings, "emails", "list", "--state", "sent")

    for said in (answer.text, answer.rendered(as_json=True)):
        assert key_of(stored_request) in said
        assert "550 5.1.1 <[address]> is unknown" in said
    assert (sent.data, sent.text) == ([], "none")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["retry"], "say which e-mails"),
        (["resend", "--dry-run"], "say which e-mails"),
        (["resend", "--code", "99"], "not the code of a mail server's refusal"),
        (["resend", "--code", "250"], "not the code of a mail server's refusal"),
        (["list", "--uuid", "1"], "not the uuid of a request"),
    ],
)
async def test_wrong_argument_is_explained(
    worker_settings: WorkerSettings, *, words: list[str], part: str
) -> None:
    with pytest.raises(InvalidArgument, match=part):
        await command(worker_settings, "emails", *words)
