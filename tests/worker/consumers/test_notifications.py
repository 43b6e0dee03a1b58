"""The consumer of request.created records one e-mail for each event in the ledger."""

import asyncio

import msgspec
import pytest

from service.calculation_requests.model import RequestNotFound
from service.identifiers import new_request_id, uuid_of
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import created_body, created_event, publish
from tests.worker.deliveries import intend_email
from tests.worker.mail.conftest import all_are
from worker.consumers import incoming, notifications
from worker.consumers.incoming import Malformed
from worker.rabbitmq.topology import NOTIFICATIONS


async def test_event_becomes_an_email_in_the_ledger(worker_settings, pool, channel, database, stored_request):
    due = asyncio.Event()

    async with running(notifications.consumer(worker_settings, pool, due).run):
        await publish(channel, NOTIFICATIONS, created_body(stored_request))
        await eventually(due.is_set)

    email = await database.fetchrow("SELECT * FROM email")
    assert email is not None
    assert email["email_key"] == f"{stored_request.uuid}.request.created.1"
    assert email["request_id"] == stored_request.id
    assert (email["state"], email["attempts"]) == ("pending", 0)


@pytest.mark.parametrize(
    ("uuid", "refusal", "text"),
    [
        ("", Malformed, "data.uuid: Expected the uuid of a request"),
        ("req_1", Malformed, "data.uuid: Expected the uuid of a request"),
        (uuid_of(new_request_id()), RequestNotFound, "data.uuid: there is no such request"),
    ],
    ids=["empty", "malformed", "unknown"],
)
async def test_uuid_of_no_request_is_refused_with_the_name_of_the_field(
    pool, stored_request, uuid, refusal, text
):
    event = msgspec.structs.replace(created_event(stored_request), uuid=uuid)

    with pytest.raises(refusal) as refused:
        await intend_email(event, pool=pool)

    assert str(refused.value) == text


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"specversion":"1.0","id":"1","source":"/","type":"request.created","data":{}}'],
    ids=["empty", "no fields", "no data"],
)
def test_body_that_is_not_an_event_is_malformed(body):
    with pytest.raises(Malformed):
        notifications.decode(incoming.read(body), None)


@pytest.mark.parametrize(
    "changed",
    [
        (b'"type":"request.created"', b'"type":"request.email_sent"'),
        *((b'"sequence":1', b'"sequence":%d' % sequence) for sequence in (2, 7, 2**31, 2**63)),
    ],
    ids=lambda changed: changed[1].decode(),
)
def test_event_that_is_not_the_first_of_its_request_is_malformed(stored_request, changed):
    body = created_body(stored_request)
    assert changed[0] in body

    with pytest.raises(Malformed):
        notifications.decode(incoming.read(body.replace(*changed)), None)


async def test_customer_is_emailed_once_however_often_the_event_is_delivered(
    pool, postman, mail_server, database, stored_request
):
    event = created_event(stored_request)

    async with running(postman.run):
        await asyncio.gather(*(intend_email(event, pool=pool) for _ in range(8)))
        await eventually(lambda: all_are(database, "sent"))
        await intend_email(event, pool=pool)
        assert await postman.start_due() == 0

    assert [mail.recipients for mail in mail_server.accepted] == [[stored_request.customer_email]]
