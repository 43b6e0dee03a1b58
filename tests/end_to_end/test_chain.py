"""From the request to its calculation: every step of the chain, once."""

from tests.end_to_end.events import publish_calculation
from tests.harness.examples import A_REQUEST
from tests.harness.processes import started
from tests.harness.waiting import eventually


async def test_request_gets_its_email_and_its_calculation(
    *, api, worker, caller, channel, subscriber, mail_server
):
    async with started(api, worker):
        response = await caller.post("/v1/request", json=A_REQUEST)
        created = response.json()["data"]
        uuid = created["uuid"]
        await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
        await publish_calculation(channel, uuid, "calc-1")
        await eventually(lambda: len(subscriber.about(uuid)) == 3)
        read_back = (await caller.get(f"/v1/request/{uuid}")).json()["data"]

    assert response.status_code == 200
    first, second, third = subscriber.about(uuid)
    assert [event["type"] for event in (first, second, third)] == [
        "request.created",
        "request.email_sent",
        "request.calculated",
    ]
    assert subscriber.sequences(uuid) == [1, 2, 3]
    assert subscriber.strays == []
    assert third["data"]["calculation_id"] == "calc-1"
    assert read_back == created | {"calculation_id": "calc-1", "updated_at": third["time"]}
    (mail,) = mail_server.accepted
    assert mail.recipients == [A_REQUEST["customer_email"]]
    text = mail.message.get_body(("plain",))
    assert text is not None
    assert created["request_url"] in text.get_content().splitlines()
