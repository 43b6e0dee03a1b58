"""GET /v1/request/:uuid."""

import httpx
import msgspec
import pytest

from service.identifiers import new_request_id, uuid_of
from service.settings import ServiceSettings
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer


async def test_retrieved_request_is_the_one_that_was_created(client: httpx.AsyncClient) -> None:
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]

    response = await client.get(f"/v1/request/{created['uuid']}")

    assert response.status_code == 200
    assert response.json()["data"] == created
    assert list(response.json()["data"]) == list(created)
    assert response.json()["errors"] is None


async def test_unknown_uuid_is_not_found(shared_client: httpx.AsyncClient) -> None:
    response = await shared_client.get(f"/v1/request/{uuid_of(new_request_id())}")

    assert response.status_code == 404
    assert response.json()["data"] is None
    assert response.json()["errors"] == [
        {
            "code": "not_found",
            "message": "There is no request with this uuid that this token may read.",
            "field": None,
            "pointer": None,
        }
    ]


@pytest.mark.parametrize(
    "path",
    [
        "nonsense",
        "req_",
        "req_" + "z" * 22,  # more than 128 bits
        "req_" + "0" * 23,
        "REQ_" + "0" * 22,
        "req_" + "0" * 21 + "-",
        "req_" + "0" * 21 + "%0A",
        "%00",
        "0190f5d4-7d1c-7c3a-8b1e-2f4a6c8e0a12",
    ],
)
async def test_malformed_uuid_is_not_found(shared_client: httpx.AsyncClient, path: str) -> None:
    response = await shared_client.get(f"/v1/request/{path}")

    assert response.status_code == 404
    assert response.json()["errors"][0]["code"] == "not_found"


async def test_request_of_another_conveyancer_is_answered_like_an_unknown_one(
    client: httpx.AsyncClient, issuer: Issuer
) -> None:
    uuid = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
    as_another = {"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"}

    others = await client.get(f"/v1/request/{uuid}", headers=as_another)
    unknown = await client.get(f"/v1/request/{uuid_of(new_request_id())}", headers=as_another)

    assert others.status_code == unknown.status_code == 404
    assert {**others.json(), "meta": None} == {**unknown.json(), "meta": None}


async def test_conveyancer_that_is_not_registered_is_refused(
    shared_client: httpx.AsyncClient, issuer: Issuer
) -> None:
    response = await shared_client.get(
        f"/v1/request/{uuid_of(new_request_id())}",
        headers={"Authorization": f"Bearer {issuer.token('stranger')}"},
    )

    assert response.status_code == 403
    assert response.json()["errors"][0]["code"] == "unknown_conveyancer"


async def test_secret_stays_the_same_under_a_new_current_key(
    client: httpx.AsyncClient, service_settings: ServiceSettings, issuer: Issuer
) -> None:
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    rotated = msgspec.structs.replace(
        service_settings, request_secret_keys=f"new:{'C' * 43},{service_settings.request_secret_keys}"
    )
    async with api_client(rotated, issuer.token()) as rotated_client:
        retrieved = (await rotated_client.get(f"/v1/request/{created['uuid']}")).json()["data"]
        newer = (await rotated_client.post("/v1/request", json=A_REQUEST)).json()["data"]

    assert retrieved["request_url"] == created["request_url"]
    assert newer["secret"] != created["secret"]
