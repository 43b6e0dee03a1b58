"""What a firm gets of its erased requests, beside the 410 that test_retrieve_request.py shows."""

import pytest

from service.every_firm import erasing
from service.identifiers import parse_uuid
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER

KEY = {"Idempotency-Key": "the-key"}


@pytest.fixture
async def erased(client, database):
    """The uuid of an erased request. There is another one."""
    answer = await client.post("/v1/request", json=A_REQUEST | {"external_id": "crm-17"}, headers=KEY)
    await client.post("/v1/request", json=A_REQUEST)
    uuid = answer.json()["data"]["uuid"]
    request_id = parse_uuid(uuid)
    assert request_id is not None
    async with database.transaction():
        assert await erasing.erase(database, [request_id]) == {request_id}
    return uuid


@pytest.mark.usefixtures("erased")
async def test_repeat_is_refused_and_stores_nothing(client, database):
    answer = await client.post("/v1/request", json=A_REQUEST | {"external_id": "crm-17"}, headers=KEY)

    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (410, "erased")
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 1


async def test_key_is_free_for_another_firm(client, issuer, erased):
    headers = KEY | {"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"}
    answer = await client.post("/v1/request", json=A_REQUEST, headers=headers)

    assert answer.status_code == 200
    assert answer.json()["data"]["uuid"] != erased


@pytest.mark.parametrize(("query", "listed"), [({}, 1), ({"external_id": "crm-17"}, 0)])
async def test_list_leaves_it_out(client, erased, query, listed):
    requests = (await client.get("/v1/request", params=query)).json()["data"]["requests"]

    assert erased not in {request["uuid"] for request in requests}
    assert len(requests) == listed
