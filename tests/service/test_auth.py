"""Who gets in: access tokens and API keys."""

import time
from pathlib import Path
from typing import Any

import httpx
import jwt
import msgspec
import pytest

from service import conveyancers
from service.identifiers import new_request_id, uuid_of
from service.postgres import Connection
from service.settings import ServiceSettings
from tests.conftest import A_REQUEST, CONVEYANCER, Issuer, api_client, eventually

STRUCTURE = "/v1/questionnaire/structure"
A_UUID = uuid_of(new_request_id())


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def ask(client: httpx.AsyncClient, headers: dict[str, str]) -> list[httpx.Response]:
    """Call every endpoint with these headers and no others."""
    client.headers.pop("Authorization", None)
    return [
        await client.post("/v1/request", json=A_REQUEST, headers=headers),
        await client.get(f"/v1/request/{A_UUID}", headers=headers),
        await client.get(STRUCTURE, headers=headers),
    ]


@pytest.mark.parametrize("header", [None, "", "Basic YTpi", "Bearer", "Token abc"])
async def test_missing_credentials_are_challenged(client: httpx.AsyncClient, header: str | None) -> None:
    for response in await ask(client, {} if header is None else {"Authorization": header}):
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == 'Bearer realm="calculation-requests"'
        assert response.json()["errors"][0]["code"] == "unauthenticated"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"exp": int(time.time()) - 3600}, "expired"),
        ({"aud": "another-service"}, "another audience"),
        ({"iss": "https://another.test"}, "another issuer"),
        ({"exp": None}, "not valid"),
        ({"aud": None}, "not valid"),
        ({"client_id": 7}, "names no client"),
        ({"headers": {"typ": "JWT"}}, "at+jwt"),
        ({"headers": {"kid": "unheard-of"}}, "not valid"),
        ({"headers": {"crit": ["exp"]}}, "not valid"),
        ({"padding": "x" * 9000}, "too large"),
    ],
)
async def test_bad_access_token_is_refused_with_the_reason(
    client: httpx.AsyncClient, issuer: Issuer, database: Connection, change: dict[str, Any], reason: str
) -> None:
    for response in await ask(client, bearer(issuer.token(**change))):
        assert response.status_code == 401
        challenge = response.headers["WWW-Authenticate"]
        assert 'error="invalid_token"' in challenge
        assert reason in challenge
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 0


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
async def test_algorithms_that_anyone_could_sign_with_are_refused(
    client: httpx.AsyncClient, algorithm: str
) -> None:
    forged = jwt.encode(
        {"client_id": CONVEYANCER, "exp": int(time.time()) + 600},
        "" if algorithm == "none" else "a secret that anyone might try, long enough",
        algorithm=algorithm,
        headers={"typ": "at+jwt", "kid": "local"},
    )

    for response in await ask(client, bearer(forged)):
        assert response.status_code == 401
        assert "algorithm" in response.headers["WWW-Authenticate"]


@pytest.mark.parametrize("token", ["nonsense", "a.b.c", "ey.ey.ey", "é"])
async def test_token_that_is_none_is_refused(client: httpx.AsyncClient, token: str) -> None:
    client.headers.pop("Authorization")
    response = await client.get(STRUCTURE, headers=[(b"Authorization", b"Bearer " + token.encode("latin-1"))])

    assert response.status_code == 401


async def test_token_signed_with_another_key_is_refused(client: httpx.AsyncClient, tmp_path: Path) -> None:
    stranger = Issuer(tmp_path)

    for response in await ask(client, bearer(stranger.token())):
        assert response.status_code == 401


@pytest.mark.parametrize(
    ("scope", "statuses"),
    [
        ("request:read", [403, 404, 200]),
        ("request:write", [200, 403, 200]),
        ("", [403, 403, 200]),
        (None, [403, 403, 200]),
    ],
)
async def test_each_endpoint_needs_its_scope(
    client: httpx.AsyncClient, issuer: Issuer, scope: str | None, statuses: list[int]
) -> None:
    responses = await ask(client, bearer(issuer.token(scope=scope)))

    assert [response.status_code for response in responses] == statuses
    for response in responses:
        if response.status_code == 403:
            assert 'error="insufficient_scope"' in response.headers["WWW-Authenticate"]
            assert response.json()["errors"][0]["code"] == "insufficient_scope"


async def test_token_is_forgotten_when_it_expires(service_settings: ServiceSettings, issuer: Issuer) -> None:
    settings = msgspec.structs.replace(service_settings, auth_leeway_seconds=0.0)
    async with api_client(settings, issuer.token(exp=int(time.time()) + 2)) as client:
        assert (await client.get(STRUCTURE)).status_code == 200

        async def refused() -> bool:
            return (await client.get(STRUCTURE)).status_code == 401

        await eventually(refused)


async def test_api_key_opens_the_questionnaire_and_nothing_else(
    client: httpx.AsyncClient, database: Connection
) -> None:
    key = await conveyancers.create_api_key(database, CONVEYANCER)

    create, retrieve, questionnaire = await ask(client, bearer(key))

    assert questionnaire.status_code == 200
    for response in (create, retrieve):
        assert response.status_code == 401
        assert "API key" in response.headers["WWW-Authenticate"]


async def test_revoked_api_key_is_refused(client: httpx.AsyncClient, database: Connection) -> None:
    key = await conveyancers.create_api_key(database, CONVEYANCER)
    assert await conveyancers.revoke_api_key(database, key.split("_")[1])

    response = await client.get(STRUCTURE, headers=bearer(key))

    assert response.status_code == 401
    assert not await conveyancers.revoke_api_key(database, key.split("_")[1])


async def test_api_key_that_was_never_issued_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.get(STRUCTURE, headers=bearer("cr_0123456789ab_" + "x" * 43))

    assert response.status_code == 401


async def test_only_the_hash_of_an_api_key_is_stored(database: Connection) -> None:
    key = await conveyancers.create_api_key(database, CONVEYANCER)

    stored = await database.fetchval("SELECT string_agg(k::text, '') FROM api_key AS k")
    assert key.split("_", 2)[2] not in stored
