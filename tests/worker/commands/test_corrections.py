"""`request find|correct|new-secret`: the old link is dead, and the right customer gets a new one."""

import asyncio

import httpx
import pytest

from service.every_firm import email_changes, operator_actions
from service.postgres.pool import Connection
from tests.harness.databases import has_waiting_statement
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import running
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import command, rendered
from tests.worker.commands.steps import assert_sound, intend, key_of, states
from tests.worker.conftest import KEYS, created_event, open_postman, settings_with, store
from tests.worker.deliveries import intend_email

CORRECTING = ("--customer-email", "eve@example.com")


@pytest.fixture
async def due(database, stored_request):
    """A request whose e-mail is due."""
    await intend(database, stored_request)
    return stored_request


async def opens(client: httpx.AsyncClient, uuid: str, secret: str) -> bool:
    """Whether a secret opens the request."""
    answer = await client.get(f"/v1/request/{uuid}", headers={"Authorization": f"Bearer {secret}"})
    assert answer.status_code in (200, 401)
    return answer.status_code == 200


async def sent(database: Connection, number: int) -> bool:
    """Whether this number of e-mails have been sent."""
    return list((await states(database)).values()).count("sent") == number


async def test_corrected_customer_gets_a_new_link_and_the_old_one_is_dead(
    client, database, worker_settings, mail_server, due
):
    async with open_postman(worker_settings) as postman, running(postman.run):
        await eventually(lambda: sent(database, 1))
        by = ("--by", "Ada", "--note", "typing error")
        answer = await command(worker_settings, "request", "correct", due.uuid, *CORRECTING, *by)
        await eventually(lambda: sent(database, 2))

    assert answer.text == f"{due.uuid} has a new secret; e-mail {key_of(due, 2)} is due"
    wrong, right = mail_server.accepted
    assert (wrong.recipients, right.recipients) == ([due.customer_email], ["eve@example.com"])
    now = (await client.get(f"/v1/request/{due.uuid}")).json()["data"]
    assert now["customer_email"] == "eve@example.com"
    body = right.message.get_body(("plain",))
    assert body is not None
    assert now["request_url"] in body.get_content().splitlines()
    assert await opens(client, due.uuid, now["secret"])
    assert not await opens(client, due.uuid, due.secret_and_url(KEYS, "")[0])
    [action] = await operator_actions.read(database, due.id)
    assert (action.action, action.operator, action.note) == ("request correct", "Ada", "typing error")
    assert action.subject == key_of(due, 2)
    await assert_sound(database)


async def test_email_that_was_in_hand_stays_cancelled_and_another_follows(
    database, worker_settings, mail_server, due
):
    async with TcpProxy(mail_server.url) as mail_link:
        mail_link.hold_before(b"RCPT")
        # The claim is not renewed meanwhile: the postman would notice that it has lost it.
        settings = settings_with(worker_settings, smtp_url=mail_link.url, email_claim_seconds=600.0)
        async with open_postman(settings) as postman, running(postman.run):
            await eventually(mail_link.marker_reached.is_set)
            await command(worker_settings, "request", "correct", due.uuid, *CORRECTING)
            mail_link.resume()
            await eventually(lambda: sent(database, 1))

    assert {mail.recipients[0] for mail in mail_server.accepted} == {due.customer_email, "eve@example.com"}
    rows = await database.fetch("SELECT email_key, state, reason FROM email ORDER BY email_key")
    assert [tuple(row) for row in rows] == [
        (key_of(due), "failed", "cancelled"),
        (key_of(due, 2), "sent", None),
    ]
    await assert_sound(database)


async def test_operator_can_do_without_an_email(client, worker_settings, database, due):
    answer = await command(worker_settings, "request", "new-secret", due.uuid, "--no-email")

    assert answer.text == f"{due.uuid} has a new secret; no e-mail is sent"
    assert await states(database) == {key_of(due): "failed"}
    assert not await opens(client, due.uuid, due.secret_and_url(KEYS, "")[0])


@pytest.mark.parametrize("sends", [True, False])
async def test_email_that_has_not_begun_is_sent_once_or_never_whatever_becomes_of_the_event(
    database, pool, worker_settings, mail_server, stored_request, *, sends
):
    words = [*CORRECTING, *([] if sends else ["--no-email"])]
    await command(worker_settings, "request", "correct", stored_request.uuid, *words)
    before = await states(database)
    await intend_email(created_event(stored_request), pool=pool)
    async with open_postman(worker_settings) as postman, running(postman.run):
        await eventually(lambda: database.fetchval("SELECT bool_and(settled_at IS NOT NULL) FROM email"))

    assert before == {key_of(stored_request): "pending" if sends else "failed"}
    assert await states(database) == {key_of(stored_request): "sent" if sends else "failed"}
    assert [mail.recipients for mail in mail_server.accepted] == ([["eve@example.com"]] if sends else [])
    await assert_sound(database)


async def test_email_that_a_consumer_is_adding_is_cancelled_and_replaced(
    worker_settings, database, other_connection, stored_request
):
    async with other_connection.transaction():
        await intend(other_connection, stored_request)
        renewing = asyncio.create_task(command(worker_settings, "request", "new-secret", stored_request.uuid))
        await eventually(lambda: has_waiting_statement(database))
    await renewing

    assert await states(database) == {key_of(stored_request): "failed", key_of(stored_request, 2): "pending"}


async def test_correction_beside_a_resend_leaves_one_email_to_the_new_address(
    worker_settings, database, other_connection, due
):
    await database.execute(
        "UPDATE email SET state = 'failed', reason = 'refused', settled_at = now(), event_sequence = 2"
    )
    await database.execute("UPDATE calculation_request SET sequence = 2")
    async with other_connection.transaction():
        resent = await email_changes.add_again(other_connection, {key_of(due): due.id})
        correcting = command(worker_settings, "request", "correct", due.uuid, *CORRECTING)
        changing = asyncio.create_task(correcting)
        await eventually(lambda: has_waiting_statement(database))
    await changing
    resent_late = await email_changes.add_again(database, {key_of(due): due.id, key_of(due, 2): due.id})

    assert (resent, resent_late) == ({due.id: key_of(due, 2)}, {})
    assert await states(database) == {
        **{key_of(due, number): "failed" for number in (1, 2)},
        key_of(due, 3): "pending",
    }
    await assert_sound(database)


async def test_correction_to_the_same_address_changes_nothing(worker_settings, database, due):
    before = await database.fetch("SELECT * FROM calculation_request")

    same = ("--customer-email", due.customer_email)
    answer = await command(worker_settings, "request", "correct", due.uuid, *same)

    assert answer.text == f"{due.uuid} has this address already: nothing was changed"
    assert await database.fetch("SELECT * FROM calculation_request") == before
    assert await states(database) == {key_of(due): "pending"}
    assert await database.fetchval("SELECT count(*) FROM operator_action") == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--customer-email", "ADA@example.com"),
        ("--external-id", "case-1"),
        ("--case-ref", A_REQUEST["case_ref"]),
    ],
)
async def test_request_is_found_by_what_the_caller_on_the_phone_knows(
    worker_settings, database, option, value
):
    known = await store(database, external_id="case-1", customer_email="Ada@Example.com")
    await store(database, external_id="case-2", customer_email="eve@example.com", case_ref="another")

    found = await command(worker_settings, "request", "find", option, value)
    not_found = await command(worker_settings, "request", "find", option, "nothing")

    assert [line.split()[0] for line in found.text.splitlines()] == ["uuid", known.uuid]
    assert "example.com" not in rendered(found).lower()
    assert (not_found.data, not_found.text) == ([], "none")
