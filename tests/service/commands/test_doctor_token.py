"""`doctor --token`: whether an access token is accepted, or why not."""

import pytest

from tests.harness.command_line import run
from tests.harness.examples import CONVEYANCER

SCOPES = "request:read, request:write"
READ_ALL, READERS = {"scope": "request:read-all"}, {"AUTH_INTERNAL_CLIENTS": CONVEYANCER}
NO_POSTGRES = {"DATABASE_URL": "postgresql://127.0.0.1:1/none"}
NO_KEYS = {"AUTH_JWKS_URL": "file:///nowhere.json"}


@pytest.mark.parametrize(
    ("claims", "variables", "status", "says"),
    [
        ({}, {}, 0, f"accepted as the conveyancer '{CONVEYANCER}', with {SCOPES}"),
        ({}, {}, 0, "ok       conveyancer  registered"),
        ({"scope": None}, {}, 1, f"accepted as the conveyancer '{CONVEYANCER}', with no scope"),
        ({"scope": "api:request:read"}, {}, 1, "with no scope of this service"),
        ({"client_id": "unheard-of"}, {}, 1, "wrong    conveyancer  'unheard-of' is not registered"),
        ({}, NO_POSTGRES, 1, "Postgres at DATABASE_URL is unavailable: connection refused; are"),
        (READ_ALL, READERS, 0, f"accepted as the internal reader '{CONVEYANCER}'"),
        ({"exp": 1}, {}, 1, "The access token has expired: request a new one\n"),
        ({"aud": "account"}, {}, 1, "is for another audience"),
        ({"aud": None}, {}, 1, "lacks the claim aud\n"),
        ({"iss": "https://another.test"}, {}, 1, "is from another issuer"),
        ({"iss": "https://another.test", "headers": {"kid": "its", "typ": "JWT"}}, {}, 1, "another issuer"),
        ({"headers": {"typ": "JWT"}}, {}, 1, "its typ must be at+jwt\n"),
        ({"headers": {"kid": "another"}}, {}, 1, "a key that the issuer does not publish\n"),
        ({"client_id": None}, {}, 1, "names no client"),
        ({}, {"AUTH_CLIENTS": "others"}, 1, "a client that the service does not accept\n"),
        ({"token_use": None}, {"AUTH_AUDIENCE": "", "AUTH_CLIENTS": CONVEYANCER}, 1, "token_use must be"),
        ({}, {"AUTH_TOKEN_TYPES": "at+jwt, JWT", "AUTH_SCOPE_CLAIM": "scp"}, 1, "none of this service"),
        ({}, NO_KEYS, 1, "FileNotFoundError; are AUTH_JWKS_URL and DATABASE_URL right?"),
    ],
)
async def test_token_is_judged(environment, issuer, claims, variables, status, says):
    if variables.get("AUTH_AUDIENCE") == "":
        claims = claims | {"aud": None}
    token = issuer.token(**claims)
    ended = await run("service", "doctor", "--token", environment=environment | variables, stdin=f"{token}\n")

    assert (ended.status, ended.errors) == (status, "")
    assert says in ended.output
    assert token not in ended.output


@pytest.mark.parametrize("text", ["", "nonsense", "a.b.c", "cr_0123456789ab_" + "x" * 43])
async def test_anything_else_is_refused_and_not_shown(environment, text):
    ended = await run("service", "doctor", "--token", environment=environment, stdin=text)

    assert (ended.status, ended.errors) == (1, "")
    assert "wrong    token" in ended.output
    assert not text or text not in ended.output
