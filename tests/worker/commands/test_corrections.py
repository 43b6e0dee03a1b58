"""`request correct` and `new-secret`: the old link is dead, and the right customer gets a new one."""

import asyncio
import json
from collections.abc import Mapping
from uuid import UUID

import pytest

from service.every_firm import announcing, email_changes, operator_actions
from service.identifiers import parse_uuid
from service.outbox.events import RequestCreated
from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.harness.command_line import run
from tests.harness.databases import has_waiting_statement
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client, running
from tests.harness.processes import Ended
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.commands.steps import assert_sound, states
from tests.worker.conftest import open_postman, settings_with
from tests.worker.deliveries import intend_email
from worker.mail import ledger
from worker.mail.ledger import EmailToSend

UNKNOWN = "req_0000000000000000000000"


@pytest.fixture
async def created(client, database):
    """A request as it was answered to the firm; its e-mail is due."""
    answered: dict[str, str] = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    await ledger.add(database, [EmailToSend(first_key(answered), id_of(answered))])
    return answered


def first_key(created: Mapping[str, str]) -> str:
    """Return the key of the first e-mail of a request."""
    return f"{created['uuid']}.request.created.1"


def id_of(created: Mapping[str, str]) -> UUID:
    """Return the id of a request."""
    request_id = parse_uuid(created["uuid"])
    assert request_id is not None
    return request_id


def correcting(created: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that corrects the address of a request."""
    return ("service", "request", "correct", created["uuid"], "--customer-email", "eve@example.com")


async def opens(settings: ServiceSettings, created: Mapping[str, str], secret: str) -> bool:
    """Whether a secret opens the request."""
    async with api_client(settings, None) as customer:
        answer = await customer.get(
            f"/v1/request/{created['uuid']}", headers={"Authorization": f"Bearer {secret}"}
        )
    assert answer.status_code in (200, 401)
    return answer.status_code == 200


async def settled(database: Connection, number: int) -> bool:
    """Whether this number of e-mails have ended."""
    return list((await states(database)).values()).count("sent") == number


async def test_corrected_customer_gets_a_new_link_and_the_old_one_is_dead(
    environment, service_settings, client, database, worker_settings, mail_server, created
):
    async with open_postman(worker_settings) as postman, running(postman.run):
        await eventually(lambda: settled(database, 1))
        by = ("--by", "Ada", "--note", "typing error")
        ended = await run(*correcting(created), *by, environment=environment)
        await eventually(lambda: settled(database, 2))

    said = f"{created['uuid']} has a new secret; e-mail {first_key(created)}.2 is due\n"
    assert ended == Ended(0, said, "")
    wrong, right = mail_server.accepted
    assert (wrong.recipients, right.recipients) == ([created["customer_email"]], ["eve@example.com"])
    now = (await client.get(f"/v1/request/{created['uuid']}")).json()["data"]
    assert now["customer_email"] == "eve@example.com"
    assert now["secret"] != created["secret"]
    body = right.message.get_body(("plain",))
    assert body is not None
    assert now["request_url"] in body.get_content().splitlines()
    assert await opens(service_settings, created, now["secret"])
    assert not await opens(service_settings, created, created["secret"])
    [action] = await operator_actions.read(database, id_of(created))
    assert (action.action, action.operator, action.note) == ("request correct", "Ada", "typing error")
    assert action.subject == f"{first_key(created)}.2"
    await assert_sound(database)


async def test_email_that_was_in_hand_stays_cancelled_and_another_follows(
    environment, database, worker_settings, mail_server, created
):
    async with TcpProxy(mail_server.url) as mail_link:
        mail_link.hold_before(b"RCPT")
        # The claim is not renewed meanwhile: the postman would notice that it has lost it.
        settings = settings_with(worker_settings, smtp_url=mail_link.url, email_claim_seconds=600.0)
        async with open_postman(settings) as postman, running(postman.run):
            await eventually(mail_link.marker_reached.is_set)
            ended = await run(*correcting(created), environment=environment)
            mail_link.resume()
            await eventually(lambda: settled(database, 1))

    assert ended.status == 0
    assert {mail.recipients[0] for mail in mail_server.accepted} == {
        created["customer_email"],
        "eve@example.com",
    }
    rows = await database.fetch("SELECT email_key, state, reason FROM email ORDER BY email_key")
    assert [tuple(row) for row in rows] == [
        (first_key(created), "failed", "cancelled"),
        (f"{first_key(created)}.2", "sent", None),
    ]
    await assert_sound(database)


async def test_operator_can_do_without_an_email(environment, service_settings, database, created):
    words = ("service", "request", "new-secret", created["uuid"], "--no-email")

    ended = await run(*words, environment=environment)

    assert ended == Ended(0, f"{created['uuid']} has a new secret; no e-mail is sent\n", "")
    assert await states(database) == {first_key(created): "failed"}
    assert not await opens(service_settings, created, created["secret"])


@pytest.mark.parametrize("sends", [True, False])
async def test_email_that_has_not_begun_is_sent_once_or_never_whatever_becomes_of_the_event(
    environment, database, client, pool, worker_settings, mail_server, *, sends
):
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    ended = await run(*correcting(created), *([] if sends else ["--no-email"]), environment=environment)
    before = await states(database)
    await intend_email(await event_of(database, created), pool=pool)
    async with open_postman(worker_settings) as postman, running(postman.run):
        await eventually(lambda: database.fetchval("SELECT bool_and(settled_at IS NOT NULL) FROM email"))

    assert ended.status == 0
    assert before == {first_key(created): "pending" if sends else "failed"}
    assert await states(database) == {first_key(created): "sent" if sends else "failed"}
    assert [mail.recipients for mail in mail_server.accepted] == ([["eve@example.com"]] if sends else [])
    await assert_sound(database)


async def event_of(database: Connection, created: Mapping[str, str]) -> RequestCreated:
    """Return the request.created of a request."""
    request_id = id_of(created)
    request = (await announcing.lock(database, [request_id]))[request_id]
    return RequestCreated(**request.event_payload(sequence=1))


async def test_email_that_a_consumer_is_adding_is_cancelled_and_replaced(
    environment, database, other_connection, client
):
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    request_id = id_of(created)

    async with other_connection.transaction():
        await ledger.add(other_connection, [EmailToSend(first_key(created), request_id)])
        words = ("service", "request", "new-secret", created["uuid"])
        renewing = asyncio.create_task(run(*words, environment=environment))
        await eventually(lambda: has_waiting_statement(database))

    assert (await renewing).status == 0
    assert await states(database) == {first_key(created): "failed", f"{first_key(created)}.2": "pending"}


async def test_correction_beside_a_resend_leaves_one_email_to_the_new_address(
    environment, database, other_connection, created
):
    request_id = id_of(created)
    await database.execute(
        "UPDATE email SET state = 'failed', reason = 'refused', settled_at = now(), event_sequence = 2"
    )
    await database.execute("UPDATE calculation_request SET sequence = 2")
    key = first_key(created)
    async with other_connection.transaction():
        resent = await email_changes.add_again(other_connection, {key: request_id})
        changing = asyncio.create_task(run(*correcting(created), environment=environment))
        await eventually(lambda: has_waiting_statement(database))
    corrected = await changing
    resent_late = await email_changes.add_again(database, {key: request_id, f"{key}.2": request_id})

    assert (resent, corrected.status, resent_late) == ({request_id: f"{key}.2"}, 0, {})
    assert await states(database) == {key: "failed", f"{key}.2": "failed", f"{key}.3": "pending"}
    await assert_sound(database)


async def test_correction_to_the_same_address_changes_nothing(environment, database, created):
    words = ("service", "request", "correct", created["uuid"], "--customer-email")
    before = await database.fetch("SELECT * FROM calculation_request")

    ended = await run(*words, created["customer_email"], environment=environment)

    assert ended == Ended(0, f"{created['uuid']} has this address already: nothing was changed\n", "")
    assert await database.fetch("SELECT * FROM calculation_request") == before
    assert await states(database) == {first_key(created): "pending"}
    assert await database.fetchval("SELECT count(*) FROM operator_action") == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--customer-email", "ADA@example.com"),
        ("--external-id", "case-1"),
        ("--case-ref", A_REQUEST["case_ref"]),
    ],
    ids=" ".join,
)
async def test_request_is_found_by_what_the_caller_on_the_phone_knows(environment, client, *, words):
    body = A_REQUEST | {"external_id": "case-1", "customer_email": "Ada@Example.com"}
    created = (await client.post("/v1/request", json=body)).json()["data"]
    other = {"external_id": "case-2", "customer_email": "eve@example.com", "case_ref": "another"}
    await client.post("/v1/request", json=A_REQUEST | other)

    found = await run("service", "request", "find", *words, "--json", environment=environment)
    shown = await run("service", "request", "find", *words, environment=environment)
    not_found = await run("service", "request", "find", words[0], "nothing", environment=environment)

    [request] = json.loads(found.output)
    assert request["uuid"] == created["uuid"]
    assert created["uuid"] in shown.output
    assert "example.com" not in found.output.lower() + shown.output.lower()
    assert (not_found.status, not_found.output) == (0, "none\n")
