"""Access tokens and API keys: which are accepted, and why others are refused.

The tokens of identity providers have the header and, of the claims that the documentation of each provider
shows, those that distinguish access tokens. Their settings are those of deploy/README.md.
"""

import hmac
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm
from jwt.utils import base64url_encode
from msgspec.structs import replace

from service.authentication import api_keys, authenticator
from service.authentication.access_tokens import READ, AccessTokens, InternalReader, InvalidCredentials
from service.authentication.authenticator import Authenticator
from service.authentication.signing_keys import SigningKeys
from service.identifiers import new_request_id, uuid_of
from tests.deploy.pages import INSTALLATION, rows
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER, STRUCTURE
from tests.harness.http import bearer
from tests.harness.in_process import api_client
from tests.harness.issuer import AUDIENCE, Issuer, api_settings
from tests.harness.waiting import eventually

A_UUID = uuid_of(new_request_id())
EC_HEADER = b'{"alg": "ES256", "typ": "at+jwt", "kid": "local"%s}'


def malformed(header: bytes, claims: bytes = b'{"iss": "https://issuer.test"}') -> str:
    return f"{base64url_encode(header).decode()}.{base64url_encode(claims).decode()}.AAAA"


def forged(token: str, algorithm: str, sign: Callable[[bytes], bytes]) -> str:
    """Return a token whose header names another algorithm, with a signature of its own."""
    header = msgspec.json.encode(jwt.get_unverified_header(token) | {"alg": algorithm})
    signed = f"{base64url_encode(header).decode()}.{token.split('.')[1]}"
    return f"{signed}.{base64url_encode(sign(signed.encode())).decode()}"


async def challenge(client: httpx.AsyncClient, token: str) -> str:
    """Return the challenge with which a token is refused."""
    headers = [(b"Authorization", b"Bearer " + token.encode("latin-1"))]
    response = await client.get(STRUCTURE, headers=headers)
    assert response.status_code == 401
    assert 'error="invalid_token"' in response.headers["WWW-Authenticate"]
    assert " scope=" not in response.headers["WWW-Authenticate"]
    return response.headers["WWW-Authenticate"]


async def ask(client: httpx.AsyncClient, headers: dict[str, str]) -> list[httpx.Response]:
    """Create, read and get the questionnaire with these headers."""
    return [
        await client.post("/v1/request", json=A_REQUEST, headers=headers),
        await client.get(f"/v1/request/{A_UUID}", headers=headers),
        await client.get(STRUCTURE, headers=headers),
    ]


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ({"exp": 4_000_000}, "expired"),
        ({"aud": "another-service"}, "another audience"),
        ({"iss": "https://another.test"}, "another issuer"),
        ({"exp": None}, "lacks the claim exp"),
        ({"exp": "4102444800"}, "its exp has the wrong type"),
        ({"aud": None}, "lacks the claim aud"),
        ({"exp": 10**400}, "a claim is out of range"),
        ({"exp": True}, "expired"),
        ({"nbf": 4102444800}, "By the service's clock, the token's nbf is in the future"),
        ({"iat": 4102444800}, "By the service's clock, the token's iat is in the future"),
        ({"sub": 7}, "its sub has the wrong type"),
        ({"client_id": 7}, "names no client: its client_id must be a text"),
        ({"client_id": "acme\0"}, "names no client"),
        ({"client_id": "acme\ud800"}, "names no client"),
        ({"scope": {"request:read": True}}, "neither a string"),
        ({"cnf": {"jkt": "x"}}, "bound to a key"),
        ({"headers": {"typ": "JWT"}}, "at+jwt"),
        ({"headers": {"typ": None}}, "at+jwt"),
        ({"headers": {"kid": "unheard-of"}}, "does not publish the access token's key"),
        ({"headers": {"crit": ["exp"]}}, "its header must have a kid, and no crit or b64"),
        ({"padding": "x" * 9000}, "at most 8192"),
        (malformed(b'{"alg":' + b"[" * 5_000), "no JWT"),
        (malformed(EC_HEADER % b"", b"[" * 5_000), "no JWT"),
        (malformed(b'{"alg": ["ES256"], "typ": "at+jwt", "kid": "local"}'), "an algorithm that is not"),
        (malformed(b'{"alg": "ES256", "typ": "at+jwt"}'), "must have a kid"),
        (malformed(EC_HEADER % b', "b64": false', b""), "no crit or b64"),
        ("nonsense", "no JWT"),
        ("é", "no JWT"),
    ],
)
async def test_bad_access_token_is_refused_with_the_reason(shared_client, issuer, token, reason):
    sent = token if isinstance(token, str) else issuer.token(**token)

    assert reason in await challenge(shared_client, sent)


async def test_forged_token_is_refused(shared_client, issuer, tmp_path):
    """Algorithm confusion: the public key, which everybody knows, is used as the secret of an HMAC."""
    public = issuer.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    ours = ECAlgorithm(ECAlgorithm.SHA256)
    tokens = [
        (forged(issuer.token(), "none", lambda _: b""), "algorithm"),
        (forged(issuer.token(), "HS256", lambda signed: hmac.digest(public, signed, "sha256")), "algorithm"),
        # The signature is valid, but the header names another accepted algorithm.
        (forged(issuer.token(), "EdDSA", lambda signed: ours.sign(signed, issuer.key)), "its alg is wrong"),
        (Issuer(tmp_path).token(), "its signature or its alg"),
    ]
    for token, reason in tokens:
        assert reason in await challenge(shared_client, token)


@pytest.mark.parametrize("prefix", ["", "id/"])
async def test_each_endpoint_needs_its_scope(service_settings, issuer, prefix):
    cases: dict[str | None, list[int]] = {
        f"{prefix}request:read": [403, 404, 200],
        f"{prefix}request:write": [200, 403, 200],
        f"{prefix}request:read-all": [403, 403, 200],  # By default no client is an internal reader.
        f"x\u00a0{prefix}request:read": [403, 403, 200],  # RFC 6749 separates scopes by spaces alone.
        f"x{prefix}request:read": [403, 403, 200],
        **{none: [403, 403, 200] for none in ("", None)},
    }
    async with api_client(service_settings, None, auth_scope_prefix=prefix) as client:
        for scope, statuses in cases.items():
            responses = await ask(client, bearer(issuer.token(scope=scope)))
            assert [response.status_code for response in responses] == statuses
            for response, needed in zip(responses, ("write", "read", ""), strict=True):
                if response.status_code == 403:
                    assert 'error="insufficient_scope"' in response.headers["WWW-Authenticate"]
                    assert f' scope="{prefix}request:{needed}"' in response.headers["WWW-Authenticate"]
                    assert response.json()["errors"][0]["code"] == "insufficient_scope"


def is_refused(verifier: Authenticator, token: str) -> bool:
    try:
        verifier.verify_access_token(token, scope=READ)
    except InvalidCredentials:
        return True
    return False


async def test_trust_in_a_token_ends_however_often_it_is_used(pool, own_issuer, monkeypatch):
    settings, keys = api_settings("", own_issuer), SigningKeys(own_issuer.jwks.as_uri())
    await keys.refresh()
    verifier = Authenticator(replace(settings, auth_leeway_seconds=3.0), keys, pool)
    expired = own_issuer.token(exp=int(time.time()))
    assert not is_refused(verifier, expired)
    await eventually(lambda: is_refused(verifier, expired))

    monkeypatch.setattr(authenticator, "_LONGEST_CACHED_SECONDS", 1.0)
    remembered, new = own_issuer.token(), own_issuer.token(jti="never seen before")
    assert not is_refused(verifier, remembered)
    own_issuer.publish("next")  # and the key "local" no more
    await keys.refresh()
    assert is_refused(verifier, new)
    assert not is_refused(verifier, remembered)
    await eventually(lambda: is_refused(verifier, remembered))


async def test_api_key_opens_the_questionnaire_alone_and_needs_no_issuer(service_settings, database, issuer):
    key = await api_keys.create(database, CONVEYANCER)
    stored = await database.fetchval("SELECT string_agg(k::text, '') FROM api_key AS k")
    made_up = bearer("cr_0123456789ab_" + "x" * 43)

    async with api_client(service_settings, None, auth_jwks_url="file:///nowhere/jwks.json") as client:
        create, retrieve, questionnaire = await ask(client, bearer(key))
        refused = await client.get(STRUCTURE, headers=made_up)
        not_verified = await ask(client, bearer(issuer.token()))

    assert [(each.status_code, each.headers["Retry-After"]) for each in not_verified] == [(503, "1")] * 3
    assert (questionnaire.status_code, refused.status_code) == (200, 401)
    for response in (create, retrieve):
        assert response.status_code == 401
        assert "API key" in response.headers["WWW-Authenticate"]
    assert key.split("_", 2)[2] not in stored


FIRM, USER, SCOPES = CONVEYANCER, "8c1c0d5a-user", "request:read request:write"
AUTH0, AUTH0_STANDARD = "Auth0, access token profile Auth0", "Auth0, access token profile RFC 9068"
ENTRA, COGNITO, OKTA = "Microsoft Entra ID", "Amazon Cognito", "Okta, custom authorization server"
KEYCLOAK = "Keycloak, other clients"
KEYCLOAK_STANDARD = 'Keycloak, clients with *Use "at+jwt" as access token header type*'
# The header's typ and the claims of a client's access token.
ACCESS: dict[str, tuple[str | None, dict[str, Any]]] = {
    AUTH0: ("JWT", {"sub": f"{FIRM}@clients", "aud": AUDIENCE, "scope": SCOPES, "azp": FIRM}),
    AUTH0_STANDARD: (
        "at+jwt",
        {"sub": f"{FIRM}@clients", "aud": AUDIENCE, "scope": SCOPES, "client_id": FIRM},
    ),
    ENTRA: ("JWT", {"sub": "0a", "aud": AUDIENCE, "roles": SCOPES.split(), "azp": FIRM, "azpacr": "1"}),
    KEYCLOAK: (
        "JWT",
        {"aud": [AUDIENCE, "account"], "typ": "Bearer", "azp": FIRM, "scope": f"email profile {SCOPES}"}
        | {"client_id": FIRM, "resource_access": {"account": {"roles": ["view-profile"]}}},
    ),
    COGNITO: (
        None,
        {"sub": FIRM, "token_use": "access", "client_id": FIRM}
        | {"scope": "IDENTIFIER/request:read IDENTIFIER/request:write"},
    ),
    OKTA: (None, {"sub": FIRM, "aud": AUDIENCE, "scp": SCOPES.split(), "cid": FIRM, "ver": 1}),
}
ACCESS[KEYCLOAK_STANDARD] = ("at+jwt", ACCESS[KEYCLOAK][1])
# The claims of the ID token that a user gets through the same client. Its header's typ is JWT, or none.
ID: dict[str, dict[str, Any]] = {
    AUTH0: {"aud": FIRM, "sub": f"auth0|{USER}", "nonce": "n", "email": "ada@example.com"},
    ENTRA: {"aud": FIRM, "sub": USER, "oid": USER, "roles": SCOPES.split()},
    KEYCLOAK: {"aud": FIRM, "sub": USER, "typ": "ID", "azp": FIRM, "at_hash": "h"},
    COGNITO: {"aud": FIRM, "sub": USER, "token_use": "id", "cognito:username": "ada"},
    OKTA: {"aud": FIRM, "sub": USER, "ver": 1, "amr": ["pwd"], "idp": "00o"},
}
ID[AUTH0_STANDARD], ID[KEYCLOAK_STANDARD] = ID[AUTH0], ID[KEYCLOAK]
NO_SCOPE, NO_KIND = "none of this service's scopes", "its claim"


def settings_on_page() -> dict[str, dict[str, str]]:
    """Return the settings of each provider, with firms of the tests in the place of CLIENT."""
    settings: dict[str, dict[str, str]] = {}
    previous: dict[str, str] = {}
    for provider, cell, _ in rows(INSTALLATION, "Identity provider", "identity provider")[1:]:
        listed = cell.replace("CLIENT,CLIENT", f"{FIRM},us")
        lower = {name.lower(): value for name, value in re.findall("`(AUTH_[A-Z_]+)=([^`]+)`", listed)}
        previous = settings[provider] = previous | lower if cell.startswith("the same") else lower
    return settings


SETTINGS = settings_on_page()


async def verified(issuer: Issuer, name: str, typ: str | None, claims: Any, **changes: Any) -> Any:
    """Verify a token of a provider, under its settings. A claim of None is left out."""
    audience = None if "auth_clients" in SETTINGS[name] else AUDIENCE
    changes = SETTINGS[name] | {"auth_jwks_url": issuer.jwks.as_uri(), "auth_audience": audience} | changes
    keys, now = SigningKeys(issuer.jwks.as_uri()), int(time.time())
    await keys.refresh()
    usual = dict.fromkeys(("client_id", "aud", "scope")) | {"iss": SETTINGS[name]["auth_issuer"]}
    token = issuer.token(headers={"typ": typ}, **(usual | {"iat": now, "nbf": now} | claims))
    return AccessTokens(replace(api_settings("", issuer), **changes), keys).verify(token)


@pytest.mark.parametrize("name", sorted({*ACCESS, *ID, *SETTINGS}))
async def test_access_token_of_a_provider_is_accepted_and_its_id_token_is_not(name, issuer):
    """API and client may be one registration at Entra, and Keycloak's mapper may be for ID tokens too."""
    typ, claims = ACCESS[name]
    scope_claim = SETTINGS[name].get("auth_scope_claim", "scope")
    read: Any = SETTINGS[name].get("auth_scope_prefix", "") + READ
    read = [read] if isinstance(claims[scope_claim], list) else read

    for changes, scopes in (({}, SCOPES.split()), ({"sub": USER, scope_claim: read}, [READ])):
        caller = await verified(issuer, name, typ, claims | changes)
        assert (caller.conveyancer_id, sorted(caller.scopes)) == (FIRM, scopes)
    for audience in (ID[name]["aud"], None if name == COGNITO else AUDIENCE):
        with pytest.raises(InvalidCredentials):
            await verified(issuer, name, typ and "JWT", ID[name] | {"aud": audience})


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (AUTH0, {"scope": None, "permissions": SCOPES.split()}, NO_SCOPE),
        # Any application of the tenant gets a token for the API, but without a role.
        (ENTRA, {"roles": None}, NO_SCOPE),
        # A user's token has delegated scopes, which any client may request.
        (ENTRA, {"roles": None, "scp": SCOPES}, NO_SCOPE),
        (ENTRA, {"iss": "https://login.microsoftonline.com/ANOTHER/v2.0"}, "another issuer"),
        (ENTRA, {"azp": None, "appid": FIRM}, "names no client"),  # a token of version 1
        (KEYCLOAK, {"typ": "ID"}, NO_KIND),  # With a mapper, an ID token may have any claim but this.
        (COGNITO, {"client_id": FREE_CONVEYANCER}, "a client that the service does not accept"),
        (COGNITO, {"scope": "another/request:read request:read"}, NO_SCOPE),
        (COGNITO, {"scope": "request:read-all", "client_id": "us"}, NO_SCOPE),
        (COGNITO, {"token_use": "id"}, NO_KIND),
        # A token bound to a resource, which is another service.
        (COGNITO, {"aud": "https://another-api.example.com"}, "another audience"),
    ],
)
async def test_token_for_something_else_opens_nothing(name, changes, reason, issuer):
    typ, claims = ACCESS[name]

    with pytest.raises(InvalidCredentials, match=reason):
        await verified(issuer, name, typ, claims | changes)


async def test_client_that_is_not_listed_opens_nothing_even_with_our_audience(issuer):
    typ, claims = ACCESS[AUTH0]

    with pytest.raises(InvalidCredentials, match="a client that the service does not accept"):
        await verified(issuer, AUTH0, typ, claims, auth_clients=FREE_CONVEYANCER)


async def test_internal_reader_has_the_scope_as_its_issuer_names_it(issuer):
    claims = ACCESS[COGNITO][1] | {"client_id": "us", "scope": "IDENTIFIER/request:read-all"}

    assert isinstance(
        await verified(issuer, COGNITO, None, claims, auth_internal_clients="us"), InternalReader
    )
