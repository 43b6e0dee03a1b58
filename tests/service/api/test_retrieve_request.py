"""GET /v1/request/:uuid and its events, with a firm's token or with the secret of the request."""

import string
from collections.abc import Iterator
from itertools import product

import httpx
import msgspec
import pytest

from service.api import errors
from service.calculation_requests.model import FOR_CUSTOMER, AlreadyErased, RequestNotFound
from service.calculation_requests.request_secrets import SecretKeyRing, WrongSecret
from service.identifiers import new_request_id, uuid_of
from tests.harness.endpoints import ENDPOINTS
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.http import bearer, lasting_headers
from tests.harness.in_process import api_client
from tests.harness.metrics import rises
from tests.service.conftest import erase_all

THE_CUSTOMERS = {*FOR_CUSTOMER, "uuid", "secret", "request_url"}
THE_FIRMS = {"notes", "external_id", "meta_data", "calculation_fee_exempt_reason"}
MISSING = "request_secret_keys_missing_total"
MALFORMED = [
    *("nonsense", "req_", "x" * 300, "%00", "0190f5d4-7d1c-7c3a-8b1e-2f4a6c8e0a12"),
    # "z" * 22 are more than 128 bits.
    *("req_" + rest for rest in ("z" * 22, "0" * 23, "0" * 21 + "-", "0" * 21 + "%0A")),
    "REQ_" + "0" * 22,
]
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


def assert_refused(response: httpx.Response) -> None:
    """Check that this is the one answer to every token that does not open a request."""
    assert response.status_code == 401
    assert response.json()["errors"] == msgspec.to_builtins(errors.translate(WrongSecret()).errors)
    assert response.headers["WWW-Authenticate"] == (
        'Bearer realm="calculation-requests", error="invalid_token", '
        'error_description="The token is neither an access token nor the secret of this request."'
    )
    assert response.headers.keys() == {
        *("date", "server", "content-type", "content-length"),
        *("www-authenticate", "x-request-id", "cache-control"),
    }


async def test_token_opens_its_requests_and_hides_all_others(service_settings, issuer, database):
    async with api_client(service_settings, issuer.token(), auth_internal_clients="reader") as client:
        gone = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
        await erase_all(database)
        there = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
        # By token: the errors for a request that is there, an erased one, and none.
        seen: dict[str, tuple[type[Exception] | None, ...]] = {
            issuer.token(): (None, AlreadyErased, RequestNotFound),
            issuer.token("reader", scope="request:read-all"): (None, AlreadyErased, RequestNotFound),
            issuer.token(FREE_CONVEYANCER): (RequestNotFound,) * 3,
            there["secret"]: (None, WrongSecret, WrongSecret),
            gone["secret"]: (WrongSecret,) * 3,
        }
        for (token, (of_there, of_gone, of_none)), what in product(seen.items(), ("", "/events")):
            if what and of_none is WrongSecret:
                continue
            expected = {there["uuid"]: of_there, gone["uuid"]: of_gone, uuid_of(new_request_id()): of_none}
            headers_of_refusals = set()
            for uuid, error in (expected | dict.fromkeys(MALFORMED, of_none)).items():
                response = await client.get(f"/v1/request/{uuid}{what}", headers=bearer(token))
                if error is None:
                    assert response.status_code == 200
                    continue
                documented = errors.translate(error())
                assert response.status_code == documented.status
                assert response.json()["errors"] == msgspec.to_builtins(documented.errors)
                headers_of_refusals.add((error, *lasting_headers(response)))
            assert len(headers_of_refusals) == len({*expected.values()} - {None})


async def test_erased_request_is_in_no_list_and_its_key_is_used_up(client, issuer, database):
    key, body = {"Idempotency-Key": "the-key"}, A_REQUEST | {"external_id": "crm-17"}
    await client.post("/v1/request", json=body, headers=key)
    await erase_all(database)
    left = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]

    another = bearer(issuer.token(FREE_CONVEYANCER))
    repeat = await client.post("/v1/request", json=body, headers=key)
    of_another = await client.post("/v1/request", json=body, headers=key | another)
    lists = [await client.get("/v1/request", params=query) for query in ({}, {"external_id": "crm-17"})]

    assert (repeat.status_code, repeat.json()["errors"][0]["code"]) == (410, "erased")
    assert of_another.status_code == 200
    assert [each.json()["data"]["requests"] for each in lists] == [[left], []]
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 2


async def test_secret_opens_the_fields_of_its_request_that_are_for_the_customer(client, created, database):
    created["calculation_id"] = "C-1"
    await database.execute("UPDATE calculation_request SET calculation_id = 'C-1'")

    response = await client.get(f"/v1/request/{created['uuid']}", headers=bearer(created["secret"]))

    data = response.json()["data"]
    assert None not in created.values()
    assert not THE_CUSTOMERS & THE_FIRMS
    assert data == {name: value if name in THE_CUSTOMERS else None for name, value in created.items()}
    assert list(data) == list(created)
    assert response.headers["Cache-Control"] == "no-store"


async def test_without_its_key_only_the_secret_is_missing(service_settings, issuer, database):
    key, lost = {"Idempotency-Key": "closing"}, f"lost:{'C' * 43}"
    ring = f"new:{'D' * 43},{service_settings.request_secret_keys},{lost}"
    async with (
        api_client(service_settings, issuer.token(), auth_internal_clients="reader") as client,
        api_client(service_settings, issuer.token(), request_secret_keys=ring) as restarted,
    ):
        older = (await client.post("/v1/request", json=A_REQUEST, headers=key)).json()["data"]
        lost_id = SecretKeyRing.parse(lost).current_id
        await database.execute("UPDATE calculation_request SET secret_key_id = $1", lost_id)
        newer = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
        path, path_of_newer = (f"/v1/request/{each['uuid']}" for each in (older, newer))
        with rises(MISSING, by=2):
            refused = [await client.get(path), await client.post("/v1/request", json=A_REQUEST, headers=key)]
        with rises(MISSING):
            listed = (await client.get("/v1/request")).json()["data"]["requests"]
        reader = bearer(issuer.token("reader", scope="request:read-all"))
        without_secret = [await client.get(f"{path}/events"), await client.get(path, headers=reader)]
        restored, same = [await restarted.get(each) for each in (path, path_of_newer)]
        newest = (await restarted.post("/v1/request", json=A_REQUEST)).json()["data"]
        opened = await restarted.get(path_of_newer, headers=bearer(newer["secret"]))

    for answer in refused:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "60")
        assert [error["code"] for error in answer.json()["errors"]] == ["secret_unavailable"]
        assert "lost" not in answer.text
    assert listed == [newer, older | dict.fromkeys(("secret", "request_url"))]
    assert [each.status_code for each in (*without_secret, opened)] == [200] * 3
    assert restored.json()["data"]["secret"] in restored.json()["data"]["request_url"]
    assert same.json()["data"] == newer
    assert newest["secret"] != newer["secret"]


def invalid_forms(secret: str) -> Iterator[str]:
    """Yield texts that are nearly this secret."""
    for position in (0, 20, 42):
        other = "B" if secret[position] == "A" else "A"
        yield secret[:position] + other + secret[position + 1 :]
    yield from (secret[:-1], secret[1:], secret.swapcase(), secret[::-1], secret[:-1] + "é")
    yield from (secret + added for added in ("A", "=", ".", "é", "\xa0", " " + secret))
    yield from ("\xa0" + secret, secret[:20] + " " + secret[20:], f'"{secret}"', "secret=" + secret)
    yield from ("A" * 43, "x" * 20_000)
    # Its last character has two bits that base64 ignores, so three others are decoded to the same.
    last = _ALPHABET.index(secret[-1])
    yield from (secret[:-1] + _ALPHABET[last ^ bits] for bits in (1, 2, 3))


@pytest.mark.parametrize(
    "change", ["secret_salt = sha256('new')", "secret_key_id = 'lost'", "withdrawn_at = now()"]
)
async def test_what_is_nearly_the_secret_or_was_it_gets_one_answer(client, created, database, change):
    """So a secret that was right is not remembered."""
    path = f"/v1/request/{created['uuid']}"
    for token in invalid_forms(created["secret"]):
        headers = [(b"Authorization", b"Bearer " + token.encode("latin-1"))]
        assert_refused(await client.get(path, headers=headers))
    assert (await client.get(path, headers=bearer(created["secret"]))).status_code == 200
    await database.execute(f"UPDATE calculation_request SET {change}")  # noqa: S608 - constants only

    for token in (created["secret"], "A" * 43):
        assert_refused(await client.get(path, headers=bearer(token)))


async def test_secret_opens_nothing_else_and_is_not_taken_from_the_query_string(client, created, database):
    secret, path = created["secret"], f"/v1/request/{created['uuid']}"
    query = f"?secret={secret}&access_token={secret}"
    without_token = await client.get(f"{path}{query}", headers={"Authorization": ""})
    as_basic = await client.get(path, auth=("secret", secret))
    for response in (without_token, as_basic):
        assert response.status_code == 401
        assert "a request's secret" in response.json()["errors"][0]["message"]
        assert response.headers["WWW-Authenticate"] == 'Bearer realm="calculation-requests"'
    assert_refused(await client.get(f"{path}{query}", headers=bearer("A" * 43)))

    other = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    client.headers.update(bearer(secret))
    for endpoint, request in product(ENDPOINTS, (created, other)):
        answer = await client.request(endpoint.method, endpoint.at(request["uuid"]), json=endpoint.body)
        takes_secrets = "request_secret" in endpoint.schemes
        assert answer.status_code == (200 if takes_secrets and request is created else 401), endpoint
        if not takes_secrets:
            assert "secret only GET /v1/request/{uuid}" in answer.json()["errors"][0]["message"]
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 2


@pytest.mark.parametrize(("secret", "cost"), [("A" * 43, 1), ("A" * 42, 0)])
async def test_made_up_secret_costs_one_statement(service_settings, link, statements, created, secret, cost):
    """Whether or not its request exists."""
    changes = {"database_url": link.url, "database_pool_size": 1}
    async with api_client(service_settings, secret, **changes) as client:
        for uuid in (created["uuid"], uuid_of(new_request_id())):
            await client.get(f"/v1/request/{uuid}")  # prepares the statement
            statements.clear()
            assert (await client.get(f"/v1/request/{uuid}")).status_code == 401
            assert len(statements.executed) == statements.round_trips == cost
