"""E-mails that the mail server refuses, that cannot be composed, or that an internal error stops."""

import msgspec
import pytest

from service.outbox.events import RequestEmailFailed
from tests.harness.in_process import running
from tests.harness.metrics import rises
from tests.harness.stored import KEYS
from tests.harness.waiting import eventually
from tests.worker.conftest import running_postman, store
from tests.worker.mail.conftest import announced, record_emails, states


@pytest.mark.parametrize(
    ("command", "code"), [("greeting", 421), ("MAIL", 550), ("RCPT", 550), ("content", 451), ("content", 250)]
)
@pytest.mark.usefixtures("intended")
async def test_secret_of_another_customer_that_the_mail_server_quotes_is_not_stored(
    worker_settings, rude_server, database, *, command, code
):
    secret, link = (await store(database)).secret_and_url(KEYS, worker_settings.app_url)
    rude_server.replies[command] = f"{code}-{link[:-9]}\r\n{code} {link[-9:]}".encode()

    async with running_postman(worker_settings, smtp_url=rude_server.url):
        reply = await eventually(lambda: database.fetchval("SELECT server_reply FROM email"))

    assert worker_settings.app_url in reply
    assert not any(part in reply for part in (secret[:9], secret[-9:]))


@pytest.mark.parametrize(
    ("field", "address"),
    [
        ("customer_email", "=?utf-8?q?a?=@example.com"),
        ("customer_email", "adé@example.com"),
        ("sender_email", "no address"),
    ],
)
async def test_email_that_cannot_be_composed_from_its_addresses_has_failed_and_is_announced(
    postman, mail_server, database, *, field, address
):
    await record_emails(database, 1)
    await database.execute(f"UPDATE calculation_request SET {field} = $1", address)  # noqa: S608 - one of two
    await record_emails(database, 1)

    async with running(postman.run):
        await eventually(lambda: database.fetchval("SELECT every(state <> 'pending') FROM email"))
        assert await postman.claim_due() == 0

    assert await states(database) == {"failed": 1, "sent": 1}
    assert len(mail_server.accepted) == 1
    [sent] = [data for kind, _, data in await announced(database) if kind == RequestEmailFailed.type]
    data = msgspec.json.decode(sent)
    assert (data["reason"], data["smtp_code"]) == ("not_composable", 0)


async def test_email_without_its_secret_key_is_postponed_and_the_others_are_sent(database, postman):
    lost, _ = await record_emails(database, 2)
    await database.execute("UPDATE calculation_request SET secret_key_id = 'lost' WHERE id = $1", lost.id)

    with rises("emails_total", outcome="internal_error"), rises("request_secret_keys_missing_total"):
        async with running(postman.run):
            await eventually(lambda: database.fetchval("SELECT every(server_reply IS NOT NULL) FROM email"))

    assert await states(database) == {"sent": 1, "pending": 1}
