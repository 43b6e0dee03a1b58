"""Requests that were erased: 410 for their firm, and as if they had never been for everyone else."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from service.api import errors
from service.calculation_requests.model import RequestErased
from service.every_firm import erasing
from service.identifiers import parse_uuid
from service.postgres.pool import Connection
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.in_process import api_client

KEY = {"Idempotency-Key": "the-key"}


async def erase(database: Connection, uuid: str) -> None:
    """Erase a request, as its command does."""
    request_id = parse_uuid(uuid)
    assert request_id is not None
    async with database.transaction():
        assert await erasing.erase(database, [request_id]) == {request_id}


@pytest.fixture
async def erased(client, database):
    """A request as it was answered before it was erased. There is another one."""
    answer = await client.post("/v1/request", json=A_REQUEST | {"external_id": "crm-17"}, headers=KEY)
    created: dict[str, Any] = answer.json()["data"]
    await client.post("/v1/request", json=A_REQUEST)
    await erase(database, created["uuid"])
    return created


@pytest.fixture
async def stranger(client, issuer):
    """A client of the same API with a token of another conveyancer."""
    headers = {"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"}
    async with httpx.AsyncClient(base_url=client.base_url, headers=headers) as connected:
        yield connected


def assert_gone(answer: httpx.Response) -> None:
    """Check that an answer is the documented one."""
    assert answer.status_code == 410
    documented = errors.translate(RequestErased()).answer()
    assert answer.json() | {"meta": None} == json.loads(documented.body) | {"meta": None}


@pytest.mark.parametrize("path", ["", "/events"])
async def test_its_firm_is_refused_with_410(client, erased, path):
    assert_gone(await client.get(f"/v1/request/{erased['uuid']}{path}"))


@pytest.mark.parametrize("path", ["", "/events"])
async def test_internal_reader_is_refused_with_410(service_settings, issuer, erased, path):
    settings = msgspec.structs.replace(service_settings, auth_internal_clients="reader")
    async with api_client(settings, issuer.token("reader", scope="request:read-all")) as reader:
        assert_gone(await reader.get(f"/v1/request/{erased['uuid']}{path}"))


@pytest.mark.parametrize("path", ["", "/events"])
async def test_another_firm_cannot_see_that_it_was_there(stranger, erased, path):
    assert (await stranger.get(f"/v1/request/{erased['uuid']}{path}")).status_code == 404


@pytest.mark.usefixtures("erased")
async def test_repeat_is_refused_and_stores_nothing(client, database):
    another_body = A_REQUEST | {"external_id": "crm-17"}

    assert_gone(await client.post("/v1/request", json=another_body, headers=KEY))

    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 1


async def test_key_is_free_for_another_firm(stranger, erased):
    answer = await stranger.post("/v1/request", json=A_REQUEST, headers=KEY)

    assert answer.status_code == 200
    assert answer.json()["data"]["uuid"] != erased["uuid"]


@pytest.mark.parametrize("query", [{}, {"external_id": "crm-17"}])
async def test_list_leaves_it_out(client, erased, query):
    listed = (await client.get("/v1/request", params=query)).json()["data"]["requests"]

    assert [each["uuid"] for each in listed if each["uuid"] == erased["uuid"]] == []
    assert len(listed) == (not query)


async def test_its_secret_opens_nothing(service_settings, erased):
    async with api_client(service_settings, erased["secret"]) as customer:
        answer = await customer.get(f"/v1/request/{erased['uuid']}")

    assert answer.status_code == 401
