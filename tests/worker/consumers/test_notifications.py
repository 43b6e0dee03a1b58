"""request.created: the customer gets one e-mail, whatever happens on the way."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import pytest
from aio_pika.abc import AbstractChannel
from structlog.testing import capture_logs

from service.calculation_requests.model import CalculationRequest, RequestNotFound
from service.identifiers import new_request_id, parse_uuid, uuid_of
from service.outbox import events
from service.outbox.events import RequestEmailFailed, RequestEmailSent
from service.postgres.pool import Connection, Pool
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import running
from tests.harness.mail_server import MailServer, ScriptedMailServer
from tests.harness.metrics import rises, value
from tests.harness.processes import started, worker_process
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import (
    created_body,
    created_event,
    open_postman,
    publish,
    settings_with,
    store,
    take,
)
from worker.consumers import notifications
from worker.consumers.consumer import Malformed
from worker.consumers.notifications import intend_email
from worker.mail.postman import Postman
from worker.rabbitmq.topology import NOTIFICATIONS
from worker.settings import WorkerSettings


@pytest.fixture
async def intended(
    database: Connection, pool: Pool, stored_request: CalculationRequest
) -> CalculationRequest:
    """A request whose e-mail is due; its request.created has left the outbox."""
    await intend_email(created_event(stored_request), pool=pool, seconds=5.0)
    await database.execute("DELETE FROM outbox")
    return stored_request


@pytest.fixture
async def rude_server() -> AsyncIterator[ScriptedMailServer]:
    """A mail server without manners."""
    async with ScriptedMailServer() as server:
        yield server


@pytest.fixture
async def mail_link(mail_server: MailServer) -> AsyncIterator[TcpProxy]:
    """A way to the mail server that the test can cut."""
    async with TcpProxy(mail_server.url) as forwarder:
        yield forwarder


class Links(NamedTuple):
    """The ways to Postgres and to the mail server."""

    postgres: TcpProxy
    mail: TcpProxy


@pytest.fixture
def links(postgres_link: TcpProxy, mail_link: TcpProxy) -> Links:
    """Ways that the test can cut."""
    return Links(postgres_link, mail_link)


async def intend_for_new_requests(database: Connection, pool: Pool, number: int) -> list[CalculationRequest]:
    """Store requests and write down that each needs its e-mail."""
    requests = [await store(database) for _ in range(number)]
    for request in requests:
        await intend_email(created_event(request), pool=pool, seconds=5.0)
    return requests


async def states(database: Connection) -> dict[str, int]:
    """Return how many e-mails are in which state."""
    return dict(await database.fetch("SELECT state, count(*) FROM email GROUP BY state"))


async def all_are(database: Connection, state: str) -> bool:
    """Whether there are e-mails, all in one state."""
    return list(await states(database)) == [state]


async def attempts(database: Connection) -> int:
    """Return how many attempts have been charged, to all e-mails together."""
    total: int = await database.fetchval("SELECT sum(attempts) FROM email")
    return total


async def announced(database: Connection) -> list[tuple[str, int, bytes]]:
    """Return the events in the outbox: type, sequence and payload."""
    rows = await database.fetch("SELECT type, sequence, payload FROM outbox ORDER BY id")
    return [(row["type"], row["sequence"], row["payload"]) for row in rows]


# From the event to the ledger


async def test_event_becomes_an_email_in_the_ledger(
    worker_settings: WorkerSettings,
    pool: Pool,
    channel: AbstractChannel,
    database: Connection,
    stored_request: CalculationRequest,
) -> None:
    due = asyncio.Event()

    async with running(notifications.consumer(worker_settings, pool, due).run):
        await publish(channel, NOTIFICATIONS, created_body(stored_request))
        await eventually(due.is_set)

    email = await database.fetchrow("SELECT * FROM email")
    assert email is not None
    assert email["event_id"] == f"{stored_request.uuid}.request.created.1"
    assert email["request_id"] == stored_request.id
    assert (email["state"], email["attempts"]) == ("pending", 0)


async def test_event_of_an_unknown_request_goes_to_the_dead_letters(
    worker_settings: WorkerSettings,
    pool: Pool,
    channel: AbstractChannel,
    database: Connection,
    stored_request: CalculationRequest,
) -> None:
    await database.execute("DELETE FROM calculation_request")

    async with running(notifications.consumer(worker_settings, pool, asyncio.Event()).run):
        await publish(channel, NOTIFICATIONS, created_body(stored_request))
        graveyard = await channel.get_queue(NOTIFICATIONS.dead_letters)
        dead = await eventually(lambda: take(graveyard))

    assert dead.headers["x-reason"] == "RequestNotFound"
    assert await database.fetchval("SELECT count(*) FROM email") == 0


async def test_uuid_of_no_request_is_refused(pool: Pool, stored_request: CalculationRequest) -> None:
    for uuid in ("", "req_1", uuid_of(new_request_id())):
        event = msgspec.structs.replace(created_event(stored_request), uuid=uuid)

        with pytest.raises(RequestNotFound):
            await intend_email(event, pool=pool, seconds=5.0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"specversion":"1.0","id":"1","source":"/","type":"request.created","data":{}}',
    ],
    ids=["empty", "no fields", "no UTF-8", "too deep", "no data"],
)
def test_body_that_is_no_event_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        notifications.decode(body)


def test_event_of_another_type_is_malformed() -> None:
    event = RequestEmailSent(
        uuid="req_1",
        tenant="acme",
        request_type="SDLT_CALCULATION",
        property_value=None,
        calculation_fee_exempt=False,
        external_id=None,
        sequence=2,
    )
    body = events.encode(event, time=datetime.now(UTC), traceparent=None)

    with pytest.raises(Malformed):
        notifications.decode(body)


@pytest.mark.parametrize("sequence", [2, 7, 2**31, 2**63])
async def test_request_created_that_is_not_the_first_event_of_its_request_is_malformed(
    pool: Pool, database: Connection, stored_request: CalculationRequest, sequence: int
) -> None:
    event = msgspec.structs.replace(created_event(stored_request), sequence=sequence)
    body = events.encode(event, time=stored_request.created_at, traceparent=None)

    with pytest.raises(Malformed):
        await intend_email(notifications.decode(body).data, pool=pool, seconds=5.0)

    assert await states(database) == {}


async def test_customer_is_mailed_once_when_the_event_comes_twice(
    pool: Pool,
    postman: Postman,
    mail_server: MailServer,
    database: Connection,
    stored_request: CalculationRequest,
) -> None:
    event = created_event(stored_request)

    async with running(postman.run):
        await intend_email(event, pool=pool, seconds=5.0)
        await eventually(lambda: all_are(database, "sent"))
        await intend_email(event, pool=pool, seconds=5.0)
        assert await postman.start_due() == 0

    assert [mail.recipients for mail in mail_server.accepted] == [[stored_request.customer_email]]


async def test_customer_is_mailed_once_when_the_event_comes_twice_at_the_same_time(
    pool: Pool,
    postman: Postman,
    mail_server: MailServer,
    database: Connection,
    stored_request: CalculationRequest,
) -> None:
    event = created_event(stored_request)

    async with running(postman.run), asyncio.TaskGroup() as deliveries:
        for _ in range(8):
            deliveries.create_task(intend_email(event, pool=pool, seconds=5.0))
        await eventually(lambda: all_are(database, "sent"))

    assert len(mail_server.accepted) == 1


# What the customer gets


async def test_email_brings_the_link_that_the_api_shows(
    client: httpx.AsyncClient, postman: Postman, mail_server: MailServer, database: Connection
) -> None:
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    request_id = parse_uuid(created["uuid"])
    assert request_id is not None
    await database.execute("INSERT INTO email (event_id, request_id) VALUES ('event-1', $1)", request_id)

    async with running(postman.run):
        await eventually(lambda: mail_server.accepted)

    shown = (await client.get(f"/v1/request/{created['uuid']}")).json()["data"]
    message = mail_server.accepted[0].message
    for kind in ("plain", "html"):
        part = message.get_body((kind,))
        assert part is not None
        lines = part.get_content().splitlines()
        assert shown["request_url"] == created["request_url"]
        assert lines.count(shown["request_url"]) == 1


async def test_email_is_addressed_to_the_customer_and_answers_go_to_the_sender(
    postman: Postman, mail_server: MailServer, intended: CalculationRequest
) -> None:
    async with running(postman.run):
        await eventually(lambda: mail_server.accepted)

    (mail,) = mail_server.accepted
    assert mail.recipients == ["ada@customer.example.com"]
    assert mail.message["To"] == "Ada Lovelace <ada@customer.example.com>"
    assert mail.message["From"] == "Calculations <calculations@service.example.com>"
    assert mail.message["Reply-To"] == "Grace Hopper <grace@firm.example.com>"
    assert mail.message["Subject"] == "Your Stamp Duty Land Tax calculation for Acme"
    assert mail.message["Auto-Submitted"] == "auto-generated"
    assert mail.message["Message-ID"] == f"<{intended.uuid}.request.created.1@service.example.com>"


async def test_email_that_is_sent_again_has_the_same_message_id_date_and_words(
    postman: Postman, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    async with running(postman.run):
        await eventually(lambda: all_are(database, "sent"))
        await database.execute("UPDATE email SET state = 'pending', next_attempt_at = now()")
        await eventually(lambda: len(mail_server.accepted) == 2)

    first, second = (
        [
            mail.message["Message-ID"],
            mail.message["Date"],
            *(part.get_payload() for part in mail.message.walk()),
        ]
        for mail in mail_server.accepted
    )
    assert first[:2] == second[:2]
    assert first[3:] == second[3:]
    assert intended.uuid in str(first[0])


# What the mail server says


async def test_accepted_email_is_sent_and_announced(
    postman: Postman, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    mail_server.data_reply = "250 OK queued as 4711"

    async with running(postman.run):
        await eventually(lambda: all_are(database, "sent"))

    email = await database.fetchrow("SELECT * FROM email")
    assert email is not None
    assert (email["server_reply"], email["attempts"], email["claimed_by"]) == ("OK queued as 4711", 1, None)
    ((event_type, sequence, payload),) = await announced(database)
    assert (event_type, sequence) == ("request.email_sent", 2)
    sent = RequestEmailSent(**intended.facts(sequence=2))
    assert msgspec.json.decode(payload)["data"] == msgspec.to_builtins(sent)
    assert await database.fetchval("SELECT sequence FROM calculation_request") == 2


async def test_email_refused_for_now_is_postponed_and_sent_later(
    postman: Postman, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    mail_server.rcpt_reply = "451 Greylisted, come back"

    async with running(postman.run):
        await eventually(lambda: attempts(database))
        reply = await database.fetchval("SELECT server_reply FROM email")
        events_meanwhile = await announced(database)
        mail_server.rcpt_reply = "250 OK"
        await eventually(lambda: all_are(database, "sent"))

    assert reply == "451 Greylisted, come back"
    assert events_meanwhile == []
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
    assert [event_type for event_type, _, _ in await announced(database)] == ["request.email_sent"]


async def test_content_refused_for_now_is_postponed_too(
    postman: Postman, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    mail_server.data_reply = "452 Out of space"

    async with running(postman.run):
        await eventually(lambda: attempts(database))
        mail_server.data_reply = "250 OK"
        await eventually(lambda: all_are(database, "sent"))

    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


async def test_pauses_between_attempts_double_up_to_the_longest(
    worker_settings: WorkerSettings,
    mail_server: MailServer,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    settings = settings_with(
        worker_settings, email_retry_seconds=100.0, email_longest_retry_seconds=300.0, email_poll_seconds=0.05
    )
    mail_server.rcpt_reply = "451 Not now"
    pauses = []

    async with open_postman(settings) as postman, running(postman.run):
        for attempt in range(1, 5):
            await eventually(partial(has_attempts, database, attempt))
            pause = "SELECT extract(epoch FROM next_attempt_at - now())::float FROM email"
            pauses.append(round(await database.fetchval(pause), -1))
            await database.execute("UPDATE email SET next_attempt_at = now()")

    assert pauses == [100, 200, 300, 300]
    assert (await database.fetchval("SELECT request_id FROM email")) == intended.id


async def has_attempts(database: Connection, number: int) -> bool:
    """Whether so many attempts have been charged."""
    return await attempts(database) == number


async def test_email_refused_for_good_has_failed_and_is_announced_without_the_address(
    postman: Postman, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    mail_server.rcpt_reply = "550 No such user ada@customer.example.com"

    async with running(postman.run):
        await eventually(lambda: all_are(database, "failed"))
        assert await postman.start_due() == 0

    ((event_type, sequence, payload),) = await announced(database)
    assert (event_type, sequence) == ("request.email_failed", 2)
    failed = RequestEmailFailed(**intended.facts(sequence=2), reason="refused", smtp_code=550)
    assert msgspec.json.decode(payload)["data"] == msgspec.to_builtins(failed)
    assert b"customer.example.com" not in payload
    assert mail_server.accepted == []


async def test_content_refused_for_good_has_failed(
    postman: Postman, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    mail_server.data_reply = "554 This is spam"

    async with running(postman.run):
        await eventually(lambda: all_are(database, "failed"))

    ((_, _, payload),) = await announced(database)
    assert msgspec.json.decode(payload)["data"]["smtp_code"] == 554
    assert msgspec.json.decode(payload)["subject"] == intended.uuid


async def test_email_refused_for_now_for_too_long_has_failed(
    worker_settings: WorkerSettings,
    mail_server: MailServer,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    await database.execute("UPDATE email SET created_at = now() - interval '1 hour'")
    mail_server.rcpt_reply = "450 Mailbox busy"

    async with (
        open_postman(settings_with(worker_settings, email_give_up_seconds=3599.0)) as postman,
        running(postman.run),
    ):
        await eventually(lambda: all_are(database, "failed"))

    ((event_type, _, payload),) = await announced(database)
    assert event_type == "request.email_failed"
    assert msgspec.json.decode(payload)["data"]["smtp_code"] == 450
    assert msgspec.json.decode(payload)["data"]["reason"] == "gave_up"
    assert msgspec.json.decode(payload)["subject"] == intended.uuid


@pytest.mark.parametrize("reply", [b"250 OK \xe9", b"250 OK \x00 done"], ids=["Latin-1", "NUL"])
async def test_acceptance_in_whatever_characters_is_recorded_and_the_email_sent_once(
    worker_settings: WorkerSettings,
    rude_server: ScriptedMailServer,
    database: Connection,
    intended: CalculationRequest,
    *,
    reply: bytes,
) -> None:
    rude_server.replies["content"] = reply
    settings = settings_with(worker_settings, smtp_url=rude_server.url, email_claim_seconds=1.0)

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(lambda: all_are(database, "sent"))

    assert len(rude_server.contents) == 1
    assert intended.uuid.encode() in rude_server.contents[0]


async def test_refusal_in_whatever_characters_is_recorded(
    worker_settings: WorkerSettings,
    rude_server: ScriptedMailServer,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    rude_server.replies["RCPT"] = b"550 Empf\xe4nger unbekannt"

    async with (
        open_postman(settings_with(worker_settings, smtp_url=rude_server.url)) as postman,
        running(postman.run),
    ):
        await eventually(lambda: all_are(database, "failed"))

    assert await database.fetchval("SELECT server_reply FROM email") == "550 Empf\ufffdnger unbekannt"
    assert [sequence for _, sequence, _ in await announced(database)] == [intended.sequence + 1]


async def test_one_refused_email_does_not_hold_up_the_others(
    postman: Postman, pool: Pool, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    mail_server.rcpt_reply = "550 No such user"
    async with running(postman.run):
        await eventually(lambda: all_are(database, "failed"))
        mail_server.rcpt_reply = "250 OK"
        await intend_for_new_requests(database, pool, 3)
        await eventually(lambda: settled(database))

    assert await states(database) == {"failed": 1, "sent": 3}
    assert intended.customer_email == "ada@customer.example.com"


async def settled(database: Connection) -> bool:
    """Whether nothing is to be sent any more."""
    return "pending" not in await states(database)


@pytest.mark.parametrize("field", ["customer_email", "sender_email"])
@pytest.mark.parametrize("address", ["=?utf-8?q?a?=@example.com", "adé@example.com", "no address"])
async def test_email_of_which_the_addresses_make_none_has_failed_and_is_announced(
    postman: Postman,
    pool: Pool,
    mail_server: MailServer,
    database: Connection,
    *,
    field: str,
    address: str,
) -> None:
    await intend_for_new_requests(database, pool, 1)
    await database.execute(f"UPDATE calculation_request SET {field} = $1", address)  # noqa: S608 - one of two
    await intend_for_new_requests(database, pool, 1)

    async with running(postman.run):
        await eventually(lambda: settled(database))
        assert await postman.start_due() == 0

    assert await states(database) == {"failed": 1, "sent": 1}
    assert len(mail_server.accepted) == 1
    [payload] = [payload for kind, _, payload in await announced(database) if kind == RequestEmailFailed.type]
    data = msgspec.json.decode(payload)["data"]
    assert (data["reason"], data["smtp_code"]) == ("not_composable", 0)


async def test_email_that_cannot_be_made_for_a_fault_of_ours_is_postponed_and_the_others_are_sent(
    postman: Postman, pool: Pool, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    await database.execute("UPDATE calculation_request SET secret_key_id = 'lost' WHERE id = $1", intended.id)
    await intend_for_new_requests(database, pool, 2)

    async with running(postman.run):
        await eventually(lambda: two_are_sent(database))
        await eventually(lambda: database.fetchval("SELECT attempts FROM email WHERE state = 'pending'"))

    assert await states(database) == {"pending": 1, "sent": 2}
    assert len(mail_server.accepted) == 2


async def two_are_sent(database: Connection) -> bool:
    """Whether two e-mails have been sent."""
    return (await states(database)).get("sent") == 2


# When things are away


async def test_mail_server_that_is_down_charges_no_attempt_and_gets_the_mail_when_it_is_back(
    worker_settings: WorkerSettings,
    mail_server: MailServer,
    mail_link: TcpProxy,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    await mail_link.refuse()

    async with (
        open_postman(settings_with(worker_settings, smtp_url=mail_link.url)) as postman,
        running(postman.run),
    ):
        await eventually(lambda: mail_link.refused >= 3)
        charged = await attempts(database)
        mail_link.admit()
        await eventually(lambda: all_are(database, "sent"))

    assert charged == 0
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


async def test_address_at_which_no_mail_server_listens_charges_no_attempt(
    postman: Postman, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    await mail_server.stop()

    async with running(postman.run):
        await eventually(lambda: was_claimed_and_released(database))
        await mail_server.start()
        await eventually(lambda: all_are(database, "sent"))

    assert await attempts(database) == 1
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


async def was_claimed_and_released(database: Connection) -> bool:
    """Whether an e-mail has been given back, uncharged."""
    return bool(
        await database.fetchval(
            "SELECT count(*) FROM email"
            " WHERE claimed_by IS NULL AND attempts = 0 AND created_at < next_attempt_at"
        )
    )


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("greeting", None),
        ("greeting", b"421 Going down"),
        ("greeting", b"554 No service for you"),
        ("EHLO", None),
        ("MAIL", None),
        ("MAIL", b"421 Going down"),
        ("MAIL", b"550 No mail of yours"),
    ],
)
async def test_mail_server_that_breaks_off_charges_no_attempt(
    worker_settings: WorkerSettings,
    rude_server: ScriptedMailServer,
    database: Connection,
    intended: CalculationRequest,
    *,
    command: str,
    answer: bytes | None,
) -> None:
    usual, rude_server.replies[command] = rude_server.replies[command], answer

    async with (
        open_postman(settings_with(worker_settings, smtp_url=rude_server.url)) as postman,
        running(postman.run),
    ):
        await eventually(lambda: rude_server.connections >= 2)
        charged = await attempts(database)
        rude_server.replies[command] = usual
        await eventually(lambda: all_are(database, "sent"))

    assert charged == 0
    assert len(rude_server.contents) == 1
    assert intended.uuid.encode() in rude_server.contents[0]


@pytest.mark.parametrize(
    ("command", "answer"),
    [("RCPT", None), ("RCPT", b"421 Not for this one"), ("DATA", None), ("DATA", b"421 Not this one")],
)
async def test_email_at_which_the_mail_server_always_breaks_off_is_given_up_and_stops_nobody(
    worker_settings: WorkerSettings,
    rude_server: ScriptedMailServer,
    pool: Pool,
    database: Connection,
    command: str,
    answer: bytes | None,
) -> None:
    rude_server.replies[command] = answer
    settings = settings_with(
        worker_settings, smtp_url=rude_server.url, email_give_up_seconds=3600.0, email_poll_seconds=60.0
    )
    await intend_for_new_requests(database, pool, 1)

    async with open_postman(settings) as postman:
        async with running(postman.run):
            await eventually(lambda: attempts(database))
        meanwhile = await states(database)
        await database.execute(
            "UPDATE email SET created_at = now() - interval '2 hours', next_attempt_at = now()"
        )
        async with running(postman.run):
            await eventually(lambda: all_are(database, "failed"))

    assert meanwhile == {"pending": 1}
    assert rude_server.contents == []
    event_type, _, payload = (await announced(database))[-1]
    assert event_type == "request.email_failed"
    assert msgspec.json.decode(payload)["data"]["reason"] == "gave_up"
    assert msgspec.json.decode(payload)["data"]["smtp_code"] == (421 if answer else 0)


async def test_mail_server_that_hangs_up_before_its_answer_gets_the_same_message_id_again(
    worker_settings: WorkerSettings,
    rude_server: ScriptedMailServer,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    rude_server.replies["content"] = None

    async with (
        open_postman(settings_with(worker_settings, smtp_url=rude_server.url)) as postman,
        running(postman.run),
    ):
        await eventually(lambda: rude_server.contents)
        rude_server.replies["content"] = b"250 OK"
        await eventually(lambda: all_are(database, "sent"))

    message_id = f"<{intended.uuid}.request.created.1@service.example.com>".encode()
    assert all(message_id in content for content in rude_server.contents)
    assert await attempts(database) == 2  # Nobody knows whether the first was accepted.


async def test_postgres_away_after_the_acceptance_does_not_send_the_email_again(
    worker_settings: WorkerSettings,
    mail_server: MailServer,
    links: Links,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    settings = settings_with(worker_settings, database_url=links.postgres.url, smtp_url=links.mail.url)
    links.mail.hold_before(b"Message-ID:")

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(links.mail.marker_reached.is_set)
        await links.postgres.refuse()
        links.mail.resume()
        await eventually(lambda: mail_server.accepted)
        await eventually(lambda: links.postgres.refused >= 3)
        links.postgres.admit()
        await eventually(lambda: all_are(database, "sent"))

    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
    assert [event_type for event_type, _, _ in await announced(database)] == ["request.email_sent"]


async def test_claim_that_fails_does_not_forget_what_the_mail_server_has_accepted(
    worker_settings: WorkerSettings,
    mail_server: MailServer,
    mail_link: TcpProxy,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    """As on a standby, which has no unlogged tables: an error unlike those of a Postgres that is away."""
    mail_link.hold_before(b"Message-ID:")
    settings = settings_with(worker_settings, smtp_url=mail_link.url, email_poll_seconds=0.01)

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(mail_link.marker_reached.is_set)
        with capture_logs() as logs:
            await database.execute("ALTER TABLE postgres_up RENAME TO elsewhere")
            await eventually(lambda: "emails_not_claimed" in {entry["event"] for entry in logs})
        mail_link.resume()
        await eventually(lambda: mail_server.accepted)
        await database.execute("ALTER TABLE elsewhere RENAME TO postgres_up")
        await eventually(lambda: all_are(database, "sent"))

    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


async def is_claimed(database: Connection) -> bool:
    """Whether somebody is sending."""
    return bool(await database.fetchval("SELECT count(*) FROM email WHERE claimed_by IS NOT NULL"))


async def test_idle_connection_that_the_mail_server_has_closed_is_replaced(
    worker_settings: WorkerSettings,
    pool: Pool,
    mail_server: MailServer,
    mail_link: TcpProxy,
    database: Connection,
) -> None:
    async with (
        open_postman(settings_with(worker_settings, smtp_url=mail_link.url)) as postman,
        running(postman.run),
    ):
        await intend_for_new_requests(database, pool, 1)
        await eventually(lambda: all_are(database, "sent"))
        await mail_link.cut()
        await intend_for_new_requests(database, pool, 1)
        await eventually(lambda: two_are_sent(database))

    assert len(mail_server.accepted) == 2
    assert await attempts(database) == 2


# Several processes


async def test_email_of_a_process_that_died_is_taken_over(
    postman: Postman, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    await database.execute(
        "UPDATE email SET claimed_by = gen_random_uuid(), next_attempt_at = now() - interval '1 second'"
    )

    async with running(postman.run):
        await eventually(lambda: all_are(database, "sent"))

    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


async def test_email_that_another_process_is_sending_is_left_alone(
    postman: Postman, database: Connection, intended: CalculationRequest
) -> None:
    await database.execute(
        "UPDATE email SET claimed_by = gen_random_uuid(), next_attempt_at = now() + interval '1 minute'"
    )

    started = await postman.start_due()

    assert started == 0
    assert await database.fetchval("SELECT request_id FROM email") == intended.id


async def test_email_under_way_is_not_claimed_again_by_the_process_that_is_sending_it(
    worker_settings: WorkerSettings,
    mail_server: MailServer,
    mail_link: TcpProxy,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    mail_link.hold_before(b"Message-ID:")
    stop = asyncio.Event()
    stop.set()

    async with open_postman(settings_with(worker_settings, smtp_url=mail_link.url)) as postman:
        assert await postman.start_due() == 1
        await eventually(mail_link.marker_reached.is_set)
        await database.execute("UPDATE email SET next_attempt_at = now() - interval '1 second'")
        started_again = await postman.start_due()
        mail_link.resume()
        await postman.run(stop)  # which finishes what is in hand

    assert started_again == 0
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
    assert await all_are(database, "sent")


@pytest.mark.usefixtures("intended")
async def test_claim_is_renewed_after_a_renewal_that_failed(
    worker_settings: WorkerSettings, mail_link: TcpProxy, database: Connection
) -> None:
    def failures() -> float:
        return value("background_failures_total", work="email_claims")

    mail_link.hold_before(b"Message-ID:")
    settings = settings_with(
        worker_settings,
        smtp_url=mail_link.url,
        email_claim_seconds=1.0,
        smtp_timeout_seconds=60.0,
        smtp_answer_seconds=60.0,
    )
    before = failures()

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(mail_link.marker_reached.is_set)
        await database.execute("ALTER TABLE email ADD CONSTRAINT unrenewed CHECK (false) NOT VALID")
        await eventually(lambda: failures() > before)
        await database.execute("ALTER TABLE email DROP CONSTRAINT unrenewed")
        claimed_until = await database.fetchval("SELECT next_attempt_at FROM email")
        await eventually(
            lambda: database.fetchval("SELECT bool_or(next_attempt_at > $1) FROM email", claimed_until)
        )
        mail_link.resume()


async def test_two_postmen_send_no_email_twice(
    worker_settings: WorkerSettings, pool: Pool, mail_server: MailServer, database: Connection
) -> None:
    requests = await intend_for_new_requests(database, pool, 40)

    async with AsyncExitStack() as resources:
        postmen = [await resources.enter_async_context(open_postman(worker_settings)) for _ in range(2)]
        async with running(*(postman.run for postman in postmen)):
            await eventually(lambda: all_are(database, "sent"), seconds=30)

    assert Counter(mail.message["Message-ID"] for mail in mail_server.accepted) == Counter(
        f"<{request.uuid}.request.created.1@service.example.com>" for request in requests
    )


async def test_two_postmen_send_no_email_twice_when_the_mail_server_is_slower_than_a_claim(
    worker_settings: WorkerSettings, pool: Pool, mail_server: MailServer, database: Connection
) -> None:
    settings = settings_with(worker_settings, email_claim_seconds=1.5, email_poll_seconds=0.05)
    mail_server.data_delay_seconds = 3.0
    await intend_for_new_requests(database, pool, 3)

    async with AsyncExitStack() as resources:
        postmen = [await resources.enter_async_context(open_postman(settings)) for _ in range(2)]
        async with running(*(postman.run for postman in postmen)):
            await eventually(lambda: all_are(database, "sent"), seconds=30)

    assert len(mail_server.accepted) == 3
    assert await attempts(database) == 3


async def test_postman_has_no_more_emails_under_way_than_it_may(
    worker_settings: WorkerSettings, pool: Pool, mail_server: MailServer, database: Connection
) -> None:
    mail_server.data_delay_seconds = 0.2
    await intend_for_new_requests(database, pool, 5)
    claimed = "SELECT count(*) FROM email WHERE claimed_by IS NOT NULL"
    most = 0

    async with (
        open_postman(settings_with(worker_settings, email_concurrency=2)) as postman,
        running(postman.run),
    ):
        while not await all_are(database, "sent"):
            most = max(most, await database.fetchval(claimed))

    assert most == 2


async def test_stopping_postman_finishes_the_email_in_hand(
    postman: Postman, mail_server: MailServer, database: Connection, intended: CalculationRequest
) -> None:
    mail_server.data_delay_seconds = 0.5

    async with running(postman.run):
        await eventually(lambda: is_claimed(database))

    assert await states(database) == {"sent": 1}
    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]


async def test_stopping_postman_frees_the_email_that_the_mail_server_was_not_given(
    worker_settings: WorkerSettings,
    mail_link: TcpProxy,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    mail_link.hold_before(b"RCPT")
    settings = settings_with(worker_settings, smtp_url=mail_link.url, shutdown_seconds=1.0)

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(mail_link.marker_reached.is_set)

    email = await database.fetchrow("SELECT *, next_attempt_at <= now() AS is_due FROM email")
    assert email is not None
    assert (email["request_id"], email["state"], email["attempts"]) == (intended.id, "pending", 0)
    assert (email["claimed_by"], email["is_due"]) == (None, True)


async def test_stopping_postman_keeps_the_claim_on_an_email_that_may_have_been_accepted(
    worker_settings: WorkerSettings,
    mail_link: TcpProxy,
    database: Connection,
    intended: CalculationRequest,
) -> None:
    mail_link.hold_before(b"Message-ID:")
    settings = settings_with(worker_settings, smtp_url=mail_link.url, shutdown_seconds=1.0)

    async with open_postman(settings) as postman, running(postman.run):
        await eventually(mail_link.marker_reached.is_set)

    assert await is_claimed(database)
    assert await database.fetchval("SELECT request_id FROM email") == intended.id


async def test_process_that_was_frozen_for_longer_than_its_claim_does_not_send_what_another_has_sent(
    worker_settings: WorkerSettings,
    mail_server: MailServer,
    mail_link: TcpProxy,
    database: Connection,
    tmp_path: Path,
    intended: CalculationRequest,
) -> None:
    settings = settings_with(worker_settings, email_claim_seconds=2.0, smtp_timeout_seconds=60.0)
    process = worker_process(settings_with(settings, smtp_url=mail_link.url), tmp_path)
    mail_link.hold_before(b"RCPT")

    async with started(process):
        await eventually(mail_link.marker_reached.is_set)
        process.freeze()
        async with open_postman(settings) as another, running(another.run):
            await eventually(lambda: all_are(database, "sent"))
        mail_link.resume()
        process.thaw()
        await eventually(lambda: "email_handled" in process.output)

    assert [mail.recipients for mail in mail_server.accepted] == [[intended.customer_email]]
    assert "email_claim_lost" in process.output


async def test_email_whose_secret_has_lost_its_key_is_put_off_and_others_are_sent(
    database: Connection, pool: Pool, postman: Postman
) -> None:
    lost, _ = await intend_for_new_requests(database, pool, 2)
    await database.execute("UPDATE calculation_request SET secret_key_id = 'lost' WHERE id = $1", lost.id)

    with (
        capture_logs() as logs,
        rises("emails_total", outcome="put_off"),
        rises("request_secret_keys_missing_total"),
    ):
        async with running(postman.run):
            await eventually(lambda: each_was_tried(database))

    assert [log["key_id"] for log in logs if log["event"] == "secret_key_missing"] == ["lost"]
    assert await states(database) == {"sent": 1, "pending": 1}


async def each_was_tried(database: Connection) -> bool:
    """Whether an attempt at every e-mail has been recorded."""
    tried: bool = await database.fetchval(
        "SELECT every(attempts > 0 AND server_reply IS NOT NULL) FROM email"
    )
    return tried
