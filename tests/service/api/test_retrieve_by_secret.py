"""GET /v1/request/:uuid with the request's own secret as the Bearer token."""

import string
from collections.abc import Iterator
from itertools import product

import httpx
import msgspec
import pytest

from service.api.errors import translate
from service.calculation_requests.model import FOR_CUSTOMER
from service.calculation_requests.request_secrets import WrongSecret
from tests.harness.endpoints import ENDPOINTS
from tests.harness.examples import A_REQUEST
from tests.harness.http import bearer
from tests.harness.in_process import api_client

THE_CUSTOMERS = {*FOR_CUSTOMER, "uuid", "secret", "request_url"}
THE_FIRMS = {"notes", "external_id", "meta_data", "calculation_fee_exempt_reason"}
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


async def ask(
    client: httpx.AsyncClient, uuid: str, token: str, *, method: str = "GET", query: str = ""
) -> httpx.Response:
    """Ask for a request with *token*, which may have any character of Latin-1."""
    headers = [(b"Authorization", b"Bearer " + token.encode("latin-1"))]
    return await client.request(method, f"/v1/request/{uuid}{query}", headers=headers)


def assert_refused(response: httpx.Response) -> None:
    """Check that this is the one answer to every token that does not open a request."""
    assert response.status_code == 401
    assert response.json()["errors"] == msgspec.to_builtins(translate(WrongSecret()).errors)
    assert response.headers["WWW-Authenticate"] == (
        'Bearer realm="calculation-requests", error="invalid_token", '
        'error_description="The token is neither an access token nor the secret of this request."'
    )
    assert response.headers.keys() == {
        *("date", "server", "content-type", "content-length"),
        *("www-authenticate", "x-request-id", "cache-control"),
    }


async def test_secret_opens_the_fields_of_its_request_that_are_for_the_customer(client, created, database):
    created["calculation_id"] = "C-1"
    await database.execute("UPDATE calculation_request SET calculation_id = 'C-1'")

    response = await ask(client, created["uuid"], created["secret"])

    assert response.status_code == 200
    assert None not in created.values()
    assert not THE_CUSTOMERS & THE_FIRMS
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
    # Its last character has two bits that base64 ignores, so three others are decoded to the same.
    last = _ALPHABET.index(secret[-1])
    yield from (secret[:-1] + _ALPHABET[last ^ bits] for bits in (1, 2, 3))


async def test_what_is_nearly_the_secret_gets_one_answer(client, created):
    for token in invalid_forms(created["secret"]):
        assert_refused(await ask(client, created["uuid"], token))


@pytest.mark.parametrize(
    "change", ["secret_salt = sha256('new')", "secret_key_id = 'lost'", "withdrawn_at = now()"]
)
async def test_secret_of_an_old_salt_a_lost_key_or_a_withdrawn_request_gets_the_same_answer(
    client, created, database, change
):
    """So a secret that was right is not remembered."""
    assert (await ask(client, created["uuid"], created["secret"])).status_code == 200
    await database.execute(f"UPDATE calculation_request SET {change}")  # noqa: S608 - constants only

    for token in (created["secret"], "A" * 43):
        assert_refused(await ask(client, created["uuid"], token))


async def test_secret_opens_nothing_else(client, created, database):
    other = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    client.headers.update(bearer(created["secret"]))
    for endpoint, request in product(ENDPOINTS, (created, other)):
        answer = await client.request(endpoint.method, endpoint.at(request["uuid"]), json=endpoint.body)
        takes_secrets = "request_secret" in endpoint.schemes
        assert answer.status_code == (200 if takes_secrets and request is created else 401), endpoint
        if not takes_secrets:
            assert "secret only GET /v1/request/{uuid}" in answer.json()["errors"][0]["message"]

    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 2


async def test_secret_is_not_taken_from_the_query_string(client, created):
    query = f"?secret={created['secret']}&access_token={created['secret']}"

    no_token = {"Authorization": ""}
    without_token = await client.get(f"/v1/request/{created['uuid']}{query}", headers=no_token)
    with_wrong_one = await ask(client, created["uuid"], "A" * 43, query=query)
    as_basic = await client.get(f"/v1/request/{created['uuid']}", auth=("secret", created["secret"]))

    for response in (without_token, as_basic):
        assert response.status_code == 401
        assert "a request's secret" in response.json()["errors"][0]["message"]
        assert response.headers["WWW-Authenticate"] == 'Bearer realm="calculation-requests"'
    assert_refused(with_wrong_one)
