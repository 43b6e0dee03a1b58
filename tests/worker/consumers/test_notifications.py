"""The consumer of request.created records one e-mail for each event in the ledger."""

import asyncio
import re

import pytest

from service.calculation_requests.model import RequestNotFound
from tests.harness.in_process import running
from tests.harness.stored import new_request
from tests.harness.waiting import eventually
from tests.worker.conftest import created_body, created_event, publish
from tests.worker.mail.conftest import all_are
from tests.worker.steps import intend_email
from worker.consumers import incoming, notifications
from worker.consumers.incoming import Malformed
from worker.rabbitmq.topology import NOTIFICATIONS


async def test_event_becomes_an_email_in_the_ledger(worker_settings, pool, channel, database, stored_request):
    due = asyncio.Event()

    async with running(notifications.consumer(worker_settings, pool, due).run):
        await publish(channel, NOTIFICATIONS, created_body(stored_request))
        await eventually(due.is_set)

    email = await database.fetchrow("SELECT request_id, number, kind, state, attempts FROM email")
    assert email == (stored_request.id, 1, "invitation", "pending", 0)


BODY = created_body(new_request())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not readable JSON: it is empty"),
        (b"{}", "Object missing required field"),
        (b'{"specversion":"1.0","id":"1","source":"/","type":"request.created","data":{}}', "data: "),
        (BODY.replace(b"request.created", b"request.email_sent"), "type: "),
        (re.sub(rb'"req_\w+"', b'""', BODY), "data.uuid: Expected the uuid of a request"),
        (re.sub(rb'"req_\w+"', b'"req_1"', BODY), "data.uuid: Expected the uuid of a request"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # A body is new in each process.
)
def test_body_that_is_no_created_event_is_malformed(body, reason):
    with pytest.raises(Malformed, match=f"^{reason}"):
        notifications.decode(incoming.read(body), None)


async def test_event_of_a_request_that_does_not_exist_is_refused(pool):
    with pytest.raises(RequestNotFound, match=r"^data\.uuid: there is no such request$"):
        await intend_email(created_event(new_request()), pool=pool)


async def test_repeated_event_leads_to_one_email(pool, postman, mail_server, database, stored_request):
    event = created_event(stored_request)

    async with running(postman.run):
        await asyncio.gather(*(intend_email(event, pool=pool) for _ in range(8)))
        await eventually(lambda: all_are(database, "sent"))
        await intend_email(event, pool=pool)
        assert await postman.claim_due() == 0

    assert [mail.recipients for mail in mail_server.accepted] == [[stored_request.customer_email]]
