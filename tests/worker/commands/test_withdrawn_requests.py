"""A request that its firm has withdrawn: its e-mails, its calculation, and operators' commands."""

import httpx
import pytest

from service.calculation_requests.model import AlreadyWithdrawn, CalculationRequest
from service.postgres.pool import Connection
from tests.worker import steps
from tests.worker.commands.conftest import command
from tests.worker.conftest import created_event

pytestmark = pytest.mark.usefixtures("on_servers")


async def withdraw(client: httpx.AsyncClient, request: CalculationRequest) -> None:
    assert (await client.post(f"/v1/request/{request.uuid}/withdrawal")).status_code == 200


async def assert_cancelled(database: Connection, request: CalculationRequest) -> None:
    assert await steps.states(database) == {steps.key_of(request): "failed"}
    events = await database.fetch("SELECT type FROM event ORDER BY sequence")
    assert events == [("request.created",), ("request.withdrawn",), ("request.email_failed",)]
    await steps.assert_sound(database)


async def test_customer_gets_no_email_even_if_request_created_is_still_on_its_way(
    *, client, database, pool, postman, mail_server, stored_request
):
    await withdraw(client, stored_request)
    await steps.intend_email(created_event(stored_request), pool=pool)
    await steps.attempt_emails(database, postman)

    assert mail_server.accepted == []
    await assert_cancelled(database, stored_request)


async def test_calculation_is_recorded_and_commands_refuse_the_request_by_name(client, database, intended):
    await withdraw(client, intended)
    await steps.calculate(database, intended.uuid)

    for words in (
        ("request", "correct", intended.uuid, "--customer-email", "eve@example.com"),
        ("request", "new-secret", intended.uuid),
        ("emails", "resend", "--sent", "--uuid", intended.uuid),
    ):
        with pytest.raises(AlreadyWithdrawn):
            await command(*words)
    unresolved = await command("emails", "list", "--unresolved")
    too_late = await steps.add_email(database, intended, 2)
    (found,) = (await command("request", "find", "--case-ref", intended.case_ref)).data
    traced = (await command("trace", intended.uuid)).data["request"]

    assert (unresolved.data, too_late) == ([], [])
    assert found["withdrawn_at"] == traced["withdrawn_at"] is not None
    assert traced["calculation_id"] == "C-1"
    assert await steps.states(database) == {steps.key_of(intended): "failed"}
