"""A request that its firm has withdrawn: its e-mails, its calculation, and operators' commands."""

import pytest

from service.calculation_requests.model import RequestWithdrawn
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import command
from tests.worker.conftest import created_event, postman_held_before
from tests.worker.steps import (
    add_email_again,
    assert_sound,
    attempt_emails,
    calculate,
    intend,
    intend_email,
    key_of,
    states,
)

pytestmark = pytest.mark.usefixtures("on_servers")


@pytest.fixture
def withdraw(client, stored_request):
    """Withdraw the request."""

    async def post() -> None:
        assert (await client.post(f"/v1/request/{stored_request.uuid}/withdrawal")).status_code == 200

    return post


async def types(database) -> list[str]:
    return [row["type"] for row in await database.fetch("SELECT type FROM event ORDER BY sequence")]


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_customer_gets_no_email_even_if_request_created_is_still_on_its_way(
    *, database, pool, postman, mail_server, stored_request, withdraw, is_recorded
):
    if is_recorded:
        await intend(database, stored_request)

    await withdraw()
    await intend_email(created_event(stored_request), pool=pool)
    await attempt_emails(database, postman)

    assert mail_server.accepted == []
    assert await states(database) == {key_of(stored_request): "failed"}
    assert await types(database) == ["request.created", "request.withdrawn", "request.email_failed"]
    await assert_sound(database)


async def test_email_that_is_being_sent_arrives_and_is_announced_as_cancelled(
    database, worker_settings, mail_server, mail_link, intended, withdraw
):
    async with postman_held_before(b"RCPT", mail_link, worker_settings, email_claim_seconds=600.0):
        await withdraw()
        mail_link.resume()
        await eventually(lambda: mail_server.accepted)

    assert await states(database) == {key_of(intended): "failed"}
    assert await types(database) == ["request.created", "request.withdrawn", "request.email_failed"]


async def test_calculation_is_recorded_and_commands_refuse_the_request_by_name(database, intended, withdraw):
    await withdraw()
    await calculate(database, intended.uuid)
    before = await database.fetch("TABLE calculation_request"), await database.fetch("TABLE email")

    for words in (
        ("request", "correct", intended.uuid, "--customer-email", "eve@example.com"),
        ("request", "new-secret", intended.uuid),
        ("emails", "resend", "--sent", "--uuid", intended.uuid),
    ):
        with pytest.raises(RequestWithdrawn):
            await command(*words)
    unresolved = await command("emails", "list", "--unresolved")
    by_one_who_had_found_it = await add_email_again(database, intended, [key_of(intended)])
    (found,) = (await command("request", "find", "--case-ref", intended.case_ref)).data
    traced = (await command("trace", intended.uuid)).data.request

    assert (unresolved.data, by_one_who_had_found_it) == ([], {})
    assert (await database.fetch("TABLE calculation_request"), await database.fetch("TABLE email")) == before
    assert found.withdrawn_at == traced.withdrawn_at is not None
    assert traced.calculation_id == "C-1"
    await assert_sound(database)
