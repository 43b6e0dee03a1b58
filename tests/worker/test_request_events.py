"""GET /v1/request/:uuid/events: the events that consumers get."""

from typing import Any

import jsonschema_rs
import msgspec

from service import app
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import worker_probes
from tests.harness.waiting import eventually
from tests.worker.conftest import TRACEPARENT, publish, take_all
from worker.mail import ledger
from worker.mail.ledger import EmailToSend
from worker.rabbitmq.topology import CALCULATION_RESULTS

FITS = jsonschema_rs.Draft202012Validator(
    {
        "$ref": "#/components/schemas/Envelope_CalculationRequestEvents_",
        "components": msgspec.to_builtins(app.describe()["components"]),
    },
    validate_formats=True,
)


async def events_of(client, uuid: str) -> list[dict[str, Any]]:
    response = await client.get(f"/v1/request/{uuid}/events")
    assert response.status_code == 200
    FITS.validate(response.json())
    events: list[dict[str, Any]] = response.json()["data"]["events"]
    return events


async def test_events_are_what_consumers_get(client, database, worker_settings, channel, tap, mail_server):
    mail_server.rcpt_reply = "550 5.1.1 no such user"
    body = A_REQUEST | {"external_id": "case-7", "property_value": 300_000}
    created = await client.post("/v1/request", json=body, headers={"traceparent": TRACEPARENT})
    uuid = created.json()["data"]["uuid"]
    result = msgspec.json.encode({"request_uuid": uuid, "calculation_id": "C-1"})
    async with worker_probes(worker_settings):
        await eventually(lambda: happened(client, uuid, 2))
        await publish(channel, CALCULATION_RESULTS, result)
        await eventually(lambda: happened(client, uuid, 3))
        mail_server.rcpt_reply = "250 OK"
        request_id = await database.fetchval("SELECT id FROM calculation_request")
        await ledger.add(database, [EmailToSend(f"{uuid}.another", request_id)])
        await eventually(lambda: happened(client, uuid, 4))
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))
    received = [msgspec.json.decode(message.body) for message in await take_all(tap)]

    shown = await events_of(client, uuid)

    assert [(event["type"], event["data"]["sequence"]) for event in shown] == [
        ("request.created", 1),
        ("request.email_failed", 2),
        ("request.calculated", 3),
        ("request.email_sent", 4),
    ]
    assert [event.pop("traceparent") for event in received[:2]] == [TRACEPARENT] * 2
    for event in received[2:]:
        event.pop("traceparent", None)
    assert shown == received
    assert [list(event) for event in shown] == [list(event) for event in received]


async def happened(client, uuid: str, events: int) -> bool:
    return len(await events_of(client, uuid)) == events
