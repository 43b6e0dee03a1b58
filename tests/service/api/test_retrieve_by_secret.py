"""GET /v1/request/:uuid with the request's own secret as the Bearer token."""

import asyncio
import base64
import json
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from service.api.errors import translate
from service.calculation_requests import reading
from service.calculation_requests.request_secrets import SecretKeyRing, WrongSecret
from service.contracts.endpoints import FULL_REQUEST
from service.identifiers import new_request_id, parse_uuid
from tests.harness.examples import A_REQUEST, SECRET_KEYS
from tests.harness.in_process import api_client
from tests.harness.metrics import rises

THE_CUSTOMERS = {
    *A_REQUEST,
    *("uuid", "created_at", "updated_at", "customer_phone", "request_type", "property_value"),
    *("calculation_id", "calculation_fee_exempt", "calculation_fee_exempt_reason", "secret", "request_url"),
}
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@pytest.fixture
async def created(client):
    """A request that has everything, as its firm sees it."""
    return (await client.post("/v1/request", json=FULL_REQUEST)).json()["data"]


@pytest.fixture
async def customer(service_settings):
    """A client without an access token."""
    async with api_client(service_settings, None) as connected:
        yield connected


async def ask(
    customer: httpx.AsyncClient, uuid: str, token: str, *, method: str = "GET", query: str = ""
) -> httpx.Response:
    """Ask for a request with *token*, which may have any character of Latin-1."""
    headers = [(b"Authorization", b"Bearer " + token.encode("latin-1"))]
    return await customer.request(method, f"/v1/request/{uuid}{query}", headers=headers)


def assert_refused(response: httpx.Response) -> None:
    """Check that this is the one answer to every token that does not open a request."""
    expected = json.loads(translate(WrongSecret()).answer().body)
    assert response.status_code == 401
    assert response.json() | {"meta": None} == expected | {"meta": None}
    assert response.headers["WWW-Authenticate"] == (
        'Bearer realm="calculation-requests", error="invalid_token", '
        'error_description="The token is neither an access token nor the secret of this request."'
    )
    assert response.headers.keys() == {
        *("date", "content-type", "content-length", "www-authenticate", "x-request-id", "cache-control")
    }


async def test_secret_opens_the_fields_of_its_request_that_are_for_the_customer(customer, created, database):
    created["calculation_id"] = "C-1"
    await database.execute("UPDATE calculation_request SET calculation_id = 'C-1'")

    response = await ask(customer, created["uuid"], created["secret"])

    assert response.status_code == 200
    assert None not in created.values()
    assert response.json()["data"] == {
        field: value if field in THE_CUSTOMERS else None for field, value in created.items()
    }
    assert list(response.json()["data"]) == list(created)
    assert response.headers["Cache-Control"] == "no-store"


async def test_secret_stays_the_same_under_a_new_current_key(created, service_settings, issuer):
    ring = f"new:{'C' * 43},{service_settings.request_secret_keys}"
    async with api_client(service_settings, issuer.token(), request_secret_keys=ring) as after:
        retrieved = (await after.get(f"/v1/request/{created['uuid']}")).json()["data"]
        newer = (await after.post("/v1/request", json=A_REQUEST)).json()["data"]
        opened = await ask(after, created["uuid"], created["secret"])

    assert retrieved["request_url"] == created["request_url"]
    assert newer["secret"] != created["secret"]
    assert opened.status_code == 200


def invalid_forms(secret: str) -> Iterator[str]:
    """Yield texts that are nearly this secret."""
    for position in (0, 20, 42):
        other = "B" if secret[position] == "A" else "A"
        yield secret[:position] + other + secret[position + 1 :]
    yield from (secret[:-1], secret[1:], secret.swapcase(), secret[::-1], secret[:-1] + "é")
    yield from (secret + added for added in ("A", "=", ".", "é", "\xa0", " " + secret))
    yield from ("\xa0" + secret, secret[:20] + " " + secret[20:], f'"{secret}"', "secret=" + secret)
    yield from ("A" * 43, "x" * 20_000)


async def test_what_is_nearly_the_secret_gets_one_answer(customer, created):
    for token in invalid_forms(created["secret"]):
        assert_refused(await ask(customer, created["uuid"], token))


async def test_secret_is_compared_encoded(customer, created):
    """The last character of 43 has two bits that base64 ignores."""
    secret = created["secret"]
    others = [
        secret[:-1] + character
        for character in _ALPHABET
        if character != secret[-1] and _decoded(secret[:-1] + character) == _decoded(secret)
    ]

    assert len(others) == 3
    for other in others:
        assert_refused(await ask(customer, created["uuid"], other))


def _decoded(secret: str) -> bytes:
    return base64.urlsafe_b64decode(secret + "=")


async def test_secret_of_an_old_salt_gets_the_same_answer_at_once(customer, created, database):
    """So a secret that was right is not remembered."""
    assert (await ask(customer, created["uuid"], created["secret"])).status_code == 200

    await database.execute("UPDATE calculation_request SET secret_salt = sha256('new')")

    assert_refused(await ask(customer, created["uuid"], created["secret"]))


async def test_secret_whose_key_left_the_ring_gets_the_same_answer(customer, created, database):
    await database.execute("UPDATE calculation_request SET secret_key_id = 'lost'")

    with rises("request_secret_keys_missing_total", by=2):
        for token in (created["secret"], "A" * 43):
            assert_refused(await ask(customer, created["uuid"], token))


class CountedKeys(dict[str, bytes]):
    """The keys of a ring. Each secret that is derived takes one out."""

    taken = 0

    def __getitem__(self, key_id: str) -> bytes:
        """Return a key, and count."""
        self.taken += 1
        return super().__getitem__(key_id)


async def test_unknown_uuid_and_lost_key_cost_a_derivation_as_a_wrong_secret_does(client, created, database):
    ring = SecretKeyRing.parse(SECRET_KEYS)
    lost = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
    await database.execute(
        "UPDATE calculation_request SET secret_key_id = 'lost' WHERE id = $1", parse_uuid(lost)
    )
    for asked in (parse_uuid(created["uuid"]), parse_uuid(lost), new_request_id()):
        assert asked is not None
        keys = CountedKeys(ring.keys)
        with pytest.raises(WrongSecret):
            await reading.find_by_secret(
                database, asked, secret="A" * 43, keys=SecretKeyRing(ring.current_id, keys)
            )
        assert keys.taken == 1


async def test_secret_opens_nothing_else(client, customer, created, database):
    other = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    headers = {"Authorization": f"Bearer {created['secret']}"}
    path = f"/v1/request/{created['uuid']}"

    answers = {
        (method, path): (await customer.request(method, path, headers=headers, json=body)).status_code
        for method, path, body in (
            ("POST", "/v1/request", A_REQUEST),
            ("GET", "/v1/request", None),
            ("GET", "/v1/request?external_id=crm-17", None),
            ("GET", f"/v1/request/{other['uuid']}", None),
            ("GET", f"{path}/events", None),
            ("GET", "/v1/questionnaire/structure", None),
            ("PUT", path, A_REQUEST),
            ("PATCH", path, A_REQUEST),
            ("DELETE", path, None),
        )
    }

    assert set(answers.values()) == {401, 405}
    assert {path for (method, path), status in answers.items() if status == 405} == {path}
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 2


async def test_secret_is_not_taken_from_the_query_string(customer, created):
    query = f"?secret={created['secret']}&access_token={created['secret']}"

    without_header = await customer.get(f"/v1/request/{created['uuid']}{query}")
    with_wrong_one = await ask(customer, created["uuid"], "A" * 43, query=query)
    as_basic = await customer.get(f"/v1/request/{created['uuid']}", auth=("secret", created["secret"]))

    for response in (without_header, as_basic):
        assert response.status_code == 401
        assert "a request's secret" in response.json()["errors"][0]["message"]
        assert response.headers["WWW-Authenticate"] == 'Bearer realm="calculation-requests"'
    assert_refused(with_wrong_one)


async def test_callers_with_secrets_take_half_of_the_queue_for_postgres(
    service_settings, issuer, created, database
):
    settings = msgspec.structs.replace(service_settings, database_pool_size=1, database_timeout_seconds=20.0)
    made_up = {"Authorization": f"Bearer {'A' * 43}"}
    async with api_client(settings, issuer.token()) as client:
        await database.execute("BEGIN; LOCK TABLE calculation_request")
        path = f"/v1/request/{created['uuid']}"
        with_secrets = [asyncio.create_task(client.get(path, headers=made_up)) for _ in range(18)]
        refused, _ = await asyncio.wait(with_secrets, return_when=asyncio.FIRST_COMPLETED)
        of_a_firm = asyncio.create_task(client.get(path))
        await asyncio.wait([of_a_firm], timeout=0.1)
        await database.execute("COMMIT")
        await asyncio.wait([*with_secrets, of_a_firm])

    assert {task.result().status_code for task in refused} == {503}
    assert of_a_firm.result().status_code == 200
