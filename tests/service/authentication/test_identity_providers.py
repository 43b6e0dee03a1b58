"""Identity providers with the settings of deploy/README.md: access tokens are accepted, and no other tokens.

The tokens have the header and, of the claims that the documentation of each provider shows, those that
distinguish access tokens.
"""

import re
import time
from typing import Any

import msgspec
import pytest

from service.settings import ServiceSettings
from tests.deploy.pages import INSTALLATION, rows
from tests.harness.examples import CONVEYANCER, FREE_CONVEYANCER
from tests.harness.http import bearer
from tests.harness.in_process import api_client
from tests.harness.issuer import AUDIENCE, Issuer
from tests.service.authentication.test_authenticator import ask

AUTH0, AUTH0_STANDARD = "Auth0, access token profile Auth0", "Auth0, access token profile RFC 9068"
ENTRA, COGNITO = "Microsoft Entra ID", "Amazon Cognito"
KEYCLOAK = "Keycloak, other clients"
KEYCLOAK_STANDARD = 'Keycloak, clients with *Use "at+jwt" as access token header type*'
OKTA = "Okta, custom authorization server"


def settings_on_page() -> dict[str, dict[str, str]]:
    """Return the settings of each provider. The page's first client is a firm of every test's database."""
    settings: dict[str, dict[str, str]] = {}
    previous: dict[str, str] = {}
    for provider, cell, _ in rows(INSTALLATION, "Identity provider", "identity provider")[1:]:
        listed = cell.replace("CLIENT,CLIENT", f"{CONVEYANCER},us")
        lower = {name.lower(): value for name, value in re.findall("`(AUTH_[A-Z_]+)=([^`]+)`", listed)}
        previous = settings[provider] = previous | lower if cell.startswith("the same") else lower
    return settings


SETTINGS = settings_on_page()
SCOPES = "request:read request:write"
USER, JWT_HEADER = "8c1c0d5a-user", {"typ": "JWT"}

# The header's typ and the claims of a client's access token.
ACCESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    AUTH0: (
        JWT_HEADER,
        {"sub": f"{CONVEYANCER}@clients", "aud": AUDIENCE, "scope": SCOPES, "azp": CONVEYANCER},
    ),
    AUTH0_STANDARD: (
        {"typ": "at+jwt"},
        {"sub": f"{CONVEYANCER}@clients", "aud": AUDIENCE, "scope": SCOPES, "client_id": CONVEYANCER},
    ),
    ENTRA: (
        JWT_HEADER,
        {"sub": "0a", "aud": AUDIENCE, "roles": SCOPES.split(), "azp": CONVEYANCER, "azpacr": "1"},
    ),
    KEYCLOAK: (
        JWT_HEADER,
        {
            "aud": [AUDIENCE, "account"],
            "typ": "Bearer",
            "azp": CONVEYANCER,
            "scope": f"email profile {SCOPES}",
            "client_id": CONVEYANCER,
            "resource_access": {"account": {"roles": ["view-profile"]}},
        },
    ),
    COGNITO: (
        {"typ": None},
        {
            "sub": CONVEYANCER,
            "token_use": "access",
            "scope": "IDENTIFIER/request:read IDENTIFIER/request:write",
            "client_id": CONVEYANCER,
        },
    ),
    OKTA: (
        {"typ": None},
        {"sub": CONVEYANCER, "aud": AUDIENCE, "scp": SCOPES.split(), "cid": CONVEYANCER, "ver": 1},
    ),
}
ACCESS[KEYCLOAK_STANDARD] = ({"typ": "at+jwt"}, ACCESS[KEYCLOAK][1])

# The claims of the ID token that a user gets through the same client. Its header's typ is JWT, or none.
ID: dict[str, dict[str, Any]] = {
    AUTH0: {"aud": CONVEYANCER, "sub": f"auth0|{USER}", "nonce": "n", "email": "ada@example.com"},
    ENTRA: {"aud": CONVEYANCER, "sub": USER, "oid": USER, "roles": SCOPES.split()},
    KEYCLOAK: {"aud": CONVEYANCER, "sub": USER, "typ": "ID", "azp": CONVEYANCER, "at_hash": "h"},
    COGNITO: {"aud": CONVEYANCER, "sub": USER, "token_use": "id", "cognito:username": "ada"},
    OKTA: {"aud": CONVEYANCER, "sub": USER, "ver": 1, "amr": ["pwd"], "idp": "00o"},
}
ID[AUTH0_STANDARD], ID[KEYCLOAK_STANDARD] = ID[AUTH0], ID[KEYCLOAK]


def token_of(issuer: Issuer, name: str, header: dict[str, Any], claims: dict[str, Any]) -> str:
    """Return a token of a provider. A header or claim of None is left out."""
    now = int(time.time())
    usual: dict[str, Any] = {"iss": SETTINGS[name]["auth_issuer"], "iat": now, "nbf": now}
    return issuer.token(headers=header, **(dict.fromkeys(("client_id", "aud", "scope")) | usual | claims))


def settings_of(name: str, settings: ServiceSettings) -> ServiceSettings:
    audience = None if "auth_clients" in SETTINGS[name] else AUDIENCE
    changes = SETTINGS[name] | {"auth_jwks_url": settings.auth_jwks_url}
    return msgspec.structs.replace(settings, auth_audience=audience, **changes)


def test_page_has_the_providers():
    assert SETTINGS.keys() == ACCESS.keys() == ID.keys()


@pytest.mark.parametrize("name", ACCESS)
async def test_access_token_is_accepted_as_its_clients_with_its_scopes(name, service_settings, issuer):
    header, claims = ACCESS[name]
    scope_claim = SETTINGS[name].get("auth_scope_claim", "scope")
    prefix = SETTINGS[name].get("auth_scope_prefix", "")
    reading: Any = f"{prefix}request:read"
    reading = [reading] if isinstance(claims[scope_claim], list) else reading

    async with api_client(settings_of(name, service_settings), None) as client:
        full = await ask(client, bearer(token_of(issuer, name, header, claims)))
        users = await ask(client, bearer(token_of(issuer, name, header, claims | {"sub": USER})))
        partial = await ask(client, bearer(token_of(issuer, name, header, claims | {scope_claim: reading})))

    for answers in (full, users):
        assert [response.status_code for response in answers] == [200, 404, 200]
    assert [response.status_code for response in partial] == [403, 404, 200]
    assert f' scope="{prefix}request:write"' in partial[0].headers["WWW-Authenticate"]


@pytest.mark.parametrize("name", ID)
async def test_id_token_is_refused_even_with_our_audience(name, service_settings, issuer):
    """API and client may be one registration at Entra, and Keycloak's mapper may be for ID tokens too."""
    header = {"typ": None} if ACCESS[name][0]["typ"] is None else JWT_HEADER
    settings = settings_of(name, service_settings)
    our_audience = ID[name] | {"aud": settings.auth_audience}

    async with api_client(settings, None) as client:
        for claims in (ID[name], our_audience):
            for response in await ask(client, bearer(token_of(issuer, name, header, claims))):
                assert response.status_code == 401


NO_SCOPE, NO_KIND = "none of this service's scopes", "its claim"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (AUTH0, {"scope": None, "permissions": SCOPES.split()}, NO_SCOPE),
        # Any application of the tenant gets a token for the API, but without a role.
        (ENTRA, {"roles": None}, NO_SCOPE),
        # A user's token has delegated scopes, which any client may request.
        (ENTRA, {"roles": None, "scp": SCOPES}, NO_SCOPE),
        (ENTRA, {"iss": "https://login.microsoftonline.com/ANOTHER/v2.0"}, "another issuer"),
        # A token of version 1.
        (ENTRA, {"azp": None, "appid": CONVEYANCER}, "names no client"),
        # With a mapper, an ID token may have any claim but this.
        (KEYCLOAK, {"typ": "ID"}, NO_KIND),
        (COGNITO, {"client_id": FREE_CONVEYANCER}, "a client that the service does not accept"),
        (COGNITO, {"scope": "another/request:read request:read"}, NO_SCOPE),
        (COGNITO, {"scope": "request:read-all", "client_id": "us"}, NO_SCOPE),
        (COGNITO, {"token_use": "id"}, NO_KIND),
        # A token bound to a resource, which is another service.
        (COGNITO, {"aud": "https://another-api.example.com"}, "another audience"),
    ],
)
async def test_token_for_something_else_opens_nothing(name, changes, reason, service_settings, issuer):
    header, claims = ACCESS[name]

    async with api_client(settings_of(name, service_settings), None) as client:
        for response in await ask(client, bearer(token_of(issuer, name, header, claims | changes))):
            assert response.status_code == 401
            assert reason in response.headers["WWW-Authenticate"]


async def test_client_that_is_not_listed_opens_nothing_even_with_our_audience(service_settings, issuer):
    async with api_client(service_settings, None, auth_clients=FREE_CONVEYANCER) as client:
        listed = await ask(client, bearer(issuer.token(FREE_CONVEYANCER)))
        others = await ask(client, bearer(issuer.token()))

    assert [response.status_code for response in listed] == [200, 404, 200]
    for response in others:
        assert response.status_code == 401
        assert "a client that the service does not accept" in response.headers["WWW-Authenticate"]


async def test_internal_reader_has_the_scope_as_its_issuer_names_it(service_settings, issuer):
    header, claims = ACCESS[COGNITO]
    claims = claims | {"client_id": "us", "scope": "IDENTIFIER/request:read-all"}
    settings = settings_of(COGNITO, service_settings)

    async with api_client(settings, None, auth_internal_clients="us") as client:
        (_, retrieved, _) = await ask(client, bearer(token_of(issuer, COGNITO, header, claims)))

    assert retrieved.status_code == 404
