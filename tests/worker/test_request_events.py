"""GET /v1/request/:uuid/events: the events that consumers get."""

from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest

from service.contracts import openapi
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import worker_probes
from tests.harness.waiting import eventually
from tests.worker.commands.steps import calculate, refuse_email, send_another_email
from tests.worker.conftest import TRACEPARENT, publish, take_all
from worker.rabbitmq.topology import CALCULATION_RESULTS

FITS = jsonschema_rs.Draft202012Validator(
    {
        "$ref": "#/components/schemas/Envelope_CalculationRequestEvents_",
        "components": msgspec.to_builtins(openapi.document()["components"]),
    },
    validate_formats=True,
)


async def events_of(client: httpx.AsyncClient, uuid: str) -> list[dict[str, Any]]:
    """Return the events that the API shows."""
    response = await client.get(f"/v1/request/{uuid}/events")
    assert response.status_code == 200
    FITS.validate(response.json())
    events: list[dict[str, Any]] = response.json()["data"]["events"]
    return events


@pytest.mark.parametrize(
    ("reply", "ended"),
    [("250 OK", "request.email_sent"), ("550 5.1.1 no such user", "request.email_failed")],
)
async def test_events_are_those_that_consumers_get_but_for_the_trace(
    client, database, worker_settings, channel, tap, mail_server, *, reply, ended
):
    mail_server.rcpt_reply = reply
    body = A_REQUEST | {"external_id": "case-7", "property_value": 300_000}
    created = await client.post("/v1/request", json=body, headers={"traceparent": TRACEPARENT})
    uuid = created.json()["data"]["uuid"]
    async with worker_probes(worker_settings):
        await eventually(lambda: happened(client, uuid, 2))
        await publish(
            channel, CALCULATION_RESULTS, msgspec.json.encode({"request_uuid": uuid, "calculation_id": "C-1"})
        )
        await eventually(lambda: happened(client, uuid, 3))
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))
    received = [msgspec.json.decode(message.body) for message in await take_all(tap)]

    shown = await events_of(client, uuid)

    assert [event["type"] for event in shown] == ["request.created", ended, "request.calculated"]
    assert [event.pop("traceparent") for event in received[:2]] == [TRACEPARENT] * 2
    received[2].pop("traceparent", None)
    assert shown == received
    assert [list(event) for event in shown] == [list(event) for event in received]


async def happened(client: httpx.AsyncClient, uuid: str, events: int) -> bool:
    """Whether the API shows this many events."""
    return len(await events_of(client, uuid)) == events


async def test_every_email_of_a_request_has_its_event(client, database, postman, mail_server, stored_request):
    await refuse_email(database, postman, mail_server, stored_request)
    await calculate(database, stored_request)
    await send_another_email(database, postman, mail_server, stored_request)

    shown = await events_of(client, stored_request.uuid)

    assert [(event["type"], event["data"]["sequence"]) for event in shown] == [
        ("request.created", 1),
        ("request.email_failed", 2),
        ("request.calculated", 3),
        ("request.email_sent", 4),
    ]
    written = await database.fetch("SELECT payload FROM outbox ORDER BY id")
    assert shown == [msgspec.json.decode(row["payload"]) for row in written]
