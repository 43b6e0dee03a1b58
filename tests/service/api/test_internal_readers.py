"""Internal readers: the clients of AUTH_INTERNAL_CLIENTS with the scope request:read-all."""

from itertools import product

import pytest
from structlog.testing import capture_logs

from service.authentication.access_tokens import READ_ALL
from service.calculation_requests import conveyancers
from service.identifiers import new_request_id, uuid_of
from tests.harness.endpoints import ENDPOINTS
from tests.harness.examples import FREE_CONVEYANCER
from tests.harness.http import bearer
from tests.harness.in_process import api_client

READER = "calculations-team"
OTHER_FIRM = "other-conveyancing"
EVERY_SCOPE = "request:read-all request:read request:write"


@pytest.fixture
async def reader(service_settings, issuer):
    """A client of an internal reader. Another internal reader is a conveyancer as well."""
    async with api_client(
        service_settings,
        issuer.token(READER, scope="request:read-all"),
        auth_internal_clients=f" {READER}, ,{FREE_CONVEYANCER}",
    ) as connected:
        yield connected


async def test_internal_reader_reads_any_request_without_its_secret_and_its_events(reader, client, created):
    path = f"/v1/request/{created['uuid']}"
    response = await reader.get(path)
    firms_events, events = [await each.get(f"{path}/events") for each in (client, reader)]

    assert (await reader.head(path)).status_code == 200
    assert response.json()["data"] == created | {"secret": None, "request_url": None}
    assert list(response.json()["data"]) == list(created)
    assert created["secret"] not in response.text
    assert events.json()["data"] == firms_events.json()["data"]
    assert [event["type"] for event in events.json()["data"]["events"]] == ["request.created"]


async def test_each_attempt_is_logged_with_client_and_uuid(reader, client, created):
    uuids = [created["uuid"], uuid_of(new_request_id()), "zqmark"]
    read = [endpoint for endpoint in ENDPOINTS if READ_ALL in endpoint.scopes]
    with capture_logs() as logs:
        for uuid, endpoint in product(uuids, read):
            await reader.request(endpoint.method, endpoint.at(uuid))
        await client.get(f"/v1/request/{created['uuid']}")

    attempts = [log for log in logs if log["event"] == "request_read_internally"]
    assert {(log["log_level"], log["client_id"]) for log in attempts} == {("info", READER)}
    shown = [uuid if uuid != "zqmark" else None for uuid, _ in product(uuids, read)]
    assert [log.get("uuid") for log in attempts] == shown
    assert not any(word in str(logs) for word in (created["secret"], "zqmark"))


@pytest.mark.parametrize("client_id", [READER, FREE_CONVEYANCER])
async def test_reader_opens_nothing_else_with_any_scopes(reader, issuer, database, created, client_id):
    others = [endpoint for endpoint in ENDPOINTS if READ_ALL not in endpoint.scopes]
    for endpoint, token in product(others, ("request:read-all", EVERY_SCOPE)):
        headers = bearer(issuer.token(client_id, scope=token))
        path = endpoint.at(created["uuid"])
        answer = await reader.request(endpoint.method, path, json=endpoint.body, headers=headers)

        if not endpoint.scopes:  # the questionnaire
            assert answer.status_code == 200
            continue
        assert answer.status_code == 403, endpoint
        (error,) = answer.json()["errors"]
        assert error["code"] == "insufficient_scope"
        assert READ_ALL in error["message"]
        (scope,) = endpoint.scopes
        assert f'scope="{scope}"' in answer.headers["WWW-Authenticate"]
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 1


@pytest.mark.parametrize(
    ("claims", "status"),
    [
        ({"client_id": "stranger"}, 403),  # not in the list
        ({"client_id": None}, 401),
        ({"client_id": [READER]}, 401),
        ({"client_id": f"{READER}, "}, 403),
        ({"client_id": READER, "scope": "request:read"}, 403),
        ({"client_id": "stranger", "sub": READER, "azp": READER}, 403),
        # A firm with both scopes that is no internal reader has its own requests only.
        ({"client_id": OTHER_FIRM, "scope": EVERY_SCOPE}, 404),
    ],
)
async def test_list_of_clients_and_scope_are_both_needed(reader, issuer, database, created, claims, status):
    await conveyancers.register(database, OTHER_FIRM, name="Other", charges_calculation_fee=None)
    token = issuer.token(**{"scope": "request:read-all", **claims})
    response = await reader.get(f"/v1/request/{created['uuid']}", headers=bearer(token))

    assert response.status_code == status
