"""GET /v1/request/:uuid and its events."""

import msgspec
import pytest

from service.api import errors
from service.api.openapi.examples import FULL_REQUEST
from service.calculation_requests import erasing
from service.calculation_requests.model import AlreadyErased, RequestNotFound
from service.calculation_requests.request_secrets import WrongSecret
from service.identifiers import new_request_id, uuid_of
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.http import bearer, lasting_headers
from tests.harness.in_process import api_client

MALFORMED = [
    *("nonsense", "req_", "x" * 300, "%00", "0190f5d4-7d1c-7c3a-8b1e-2f4a6c8e0a12"),
    "req_" + "z" * 22,  # more than 128 bits
    *("req_" + "0" * 23, "REQ_" + "0" * 22, "req_" + "0" * 21 + "-", "req_" + "0" * 21 + "%0A"),
]


async def test_retrieved_request_is_the_one_that_was_created(client):
    sent = FULL_REQUEST | {"meta_data": {"z": 1, "a": 2, "m": 1e17}}
    created = await client.post("/v1/request", json=sent)

    response = await client.get(f"/v1/request/{created.json()['data']['uuid']}")

    assert response.status_code == 200
    shown, answered = [each.text.partition(',"meta":')[0] for each in (response, created)]
    assert shown == answered
    assert '"meta_data":{"z":1,"a":2,"m":1e17}' in response.text


@pytest.mark.parametrize("what", ["", "/events"], ids=["record", "events"])
async def test_token_opens_its_requests_and_hides_all_others(service_settings, issuer, database, what):
    async with api_client(service_settings, issuer.token(), auth_internal_clients="reader") as client:
        gone = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
        async with database.transaction():
            await erasing.erase(database, [await database.fetchval("SELECT id FROM calculation_request")])
        there = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
        # By token: the errors for a request that is there, an erased one, and none.
        answers: dict[str, tuple[type[Exception] | None, ...]] = {
            issuer.token(): (None, AlreadyErased, RequestNotFound),
            issuer.token("reader", scope="request:read-all"): (None, AlreadyErased, RequestNotFound),
            issuer.token(FREE_CONVEYANCER): (RequestNotFound,) * 3,
        }
        if not what:
            answers[there["secret"]] = (None, WrongSecret, WrongSecret)
            answers[gone["secret"]] = (WrongSecret,) * 3
        for token, (of_there, of_gone, of_none) in answers.items():
            expected = {there["uuid"]: of_there, gone["uuid"]: of_gone, uuid_of(new_request_id()): of_none}
            expected |= dict.fromkeys(MALFORMED, of_none)
            headers_of_refusals = set()
            for uuid, error in expected.items():
                response = await client.get(f"/v1/request/{uuid}{what}", headers=bearer(token))
                if error is None:
                    assert response.status_code == 200
                    continue
                documented = errors.translate(error())
                assert response.status_code == documented.status
                assert response.json()["errors"] == msgspec.to_builtins(documented.errors)
                headers_of_refusals.add((error, *lasting_headers(response)))
            assert len(headers_of_refusals) == len({*expected.values()} - {None})


async def test_repeat_of_an_erased_request_is_refused_its_key_is_free_for_another_firm_and_no_list_has_it(
    client, issuer, database
):
    key, body = {"Idempotency-Key": "the-key"}, A_REQUEST | {"external_id": "crm-17"}
    await client.post("/v1/request", json=body, headers=key)
    async with database.transaction():
        await erasing.erase(database, [await database.fetchval("SELECT id FROM calculation_request")])
    left = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]

    another = bearer(issuer.token(FREE_CONVEYANCER))
    repeat = await client.post("/v1/request", json=body, headers=key)
    of_another = await client.post("/v1/request", json=body, headers=key | another)
    lists = [
        (await client.get("/v1/request", params=query)).json()["data"]["requests"]
        for query in ({}, {"external_id": "crm-17"})
    ]

    assert (repeat.status_code, repeat.json()["errors"][0]["code"]) == (410, "erased")
    assert of_another.status_code == 200
    assert lists == [[left], []]
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 2
