"""Access tokens and API keys: which are accepted, and why others are refused."""

import hmac
import time
from collections.abc import Callable

import httpx
import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from jwt.utils import base64url_encode

from service.authentication import api_keys, authenticator
from service.authentication.access_tokens import READ, InvalidCredentials
from service.authentication.authenticator import Authenticator
from service.authentication.signing_keys import SigningKeys
from service.identifiers import new_request_id, uuid_of
from service.postgres.pool import open_pool
from tests.harness.examples import A_REQUEST, CONVEYANCER, STRUCTURE
from tests.harness.http import bearer
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer
from tests.harness.waiting import eventually

A_UUID = uuid_of(new_request_id())


def forged(token: str, algorithm: str, sign: Callable[[bytes], bytes]) -> str:
    """Return a token whose header names another algorithm, with a signature of its own."""
    header = msgspec.json.encode(jwt.get_unverified_header(token) | {"alg": algorithm})
    signed = f"{base64url_encode(header).decode()}.{token.split('.')[1]}"
    return f"{signed}.{base64url_encode(sign(signed.encode())).decode()}"


async def ask(client: httpx.AsyncClient, headers: dict[str, str]) -> list[httpx.Response]:
    """Call every endpoint with these headers."""
    return [
        await client.post("/v1/request", json=A_REQUEST, headers=headers),
        await client.get(f"/v1/request/{A_UUID}", headers=headers),
        await client.get(STRUCTURE, headers=headers),
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
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
    ],
)
async def test_bad_access_token_is_refused_with_the_reason(shared_client, issuer, change, reason):
    for response in await ask(shared_client, bearer(issuer.token(**change))):
        assert response.status_code == 401
        challenge = response.headers["WWW-Authenticate"]
        assert 'error="invalid_token"' in challenge
        assert reason in challenge
        assert " scope=" not in challenge


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
        for response in await ask(shared_client, bearer(token)):
            assert response.status_code == 401
            assert reason in response.headers["WWW-Authenticate"]


RSA = (RSAAlgorithm, lambda: rsa.generate_private_key(65_537, 2048))
P_521 = (ECAlgorithm, lambda: ec.generate_private_key(ec.SECP521R1()))
ED_25519 = (OKPAlgorithm, ed25519.Ed25519PrivateKey.generate)
OF_ED_25519 = {"EdDSA", "Ed25519"}
RSA_ALGORITHMS = {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}


@pytest.mark.parametrize(
    ("kind", "published", "signing", "accepted"),
    [
        (RSA, None, RSA_ALGORITHMS, RSA_ALGORITHMS),
        (RSA, "PS256", RSA_ALGORITHMS, {"PS256"}),
        (RSA, "HS256", RSA_ALGORITHMS, set()),
        (P_521, "ES512", {"ES512"}, {"ES512"}),
        (ED_25519, "EdDSA", OF_ED_25519, {"EdDSA"}),
        (ED_25519, "Ed25519", OF_ED_25519, {"Ed25519"}),
        (ED_25519, None, OF_ED_25519, OF_ED_25519),
    ],
)
async def test_key_verifies_its_algorithms(service_settings, own_issuer, kind, published, signing, accepted):
    form, generate = kind
    private = generate()
    key = form.to_jwk(private.public_key(), as_dict=True) | {"kid": "the key"}
    key |= {"alg": published} if published else {}
    other = msgspec.json.decode(own_issuer.jwks.read_bytes())["keys"]
    own_issuer.jwks.write_bytes(msgspec.json.encode({"keys": [key, *other]}))
    claims = jwt.decode(own_issuer.token(), options={"verify_signature": False})
    headers = {"typ": "at+jwt", "kid": "the key"}

    async with api_client(service_settings, None, auth_jwks_url=own_issuer.jwks.as_uri()) as client:
        for algorithm in signing:
            token = jwt.encode(claims, private, algorithm=algorithm, headers=headers)
            answer = await client.get(STRUCTURE, headers=bearer(token))
            assert answer.status_code == (200 if algorithm in accepted else 401), algorithm


def malformed(header: bytes, claims: bytes = b'{"iss": "https://issuer.test"}') -> str:
    return f"{base64url_encode(header).decode()}.{base64url_encode(claims).decode()}.AAAA"


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (malformed(b'{"alg":' + b"[" * 5_000), "no JWT"),
        (malformed(b'{"alg": "ES256", "typ": "at+jwt", "kid": "local"}', b"[" * 5_000), "no JWT"),
        (malformed(b'{"alg": ["ES256"], "typ": "at+jwt", "kid": "local"}'), "an algorithm that is not"),
        (malformed(b'{"alg": "ES256", "typ": "at+jwt"}'), "must have a kid"),
        (
            malformed(b'{"alg": "ES256", "typ": "at+jwt", "kid": "local", "b64": false}', b""),
            "no crit or b64",
        ),
        ("nonsense", "no JWT"),
        ("é", "no JWT"),
    ],
)
async def test_malformed_token_is_refused_with_the_reason(shared_client, token, reason):
    header = {"Authorization": f"Bearer {token}".encode("latin-1")}

    response = await shared_client.get(STRUCTURE, headers=header)

    assert response.status_code == 401
    assert 'error="invalid_token"' in response.headers["WWW-Authenticate"]
    assert reason in response.headers["WWW-Authenticate"]


@pytest.mark.parametrize(
    ("scope", "statuses"),
    [
        ("request:read", [403, 404, 200]),
        ("request:write", [200, 403, 200]),
        ("request:read-all", [403, 403, 200]),  # By default no client is an internal reader.
        ("x\u00a0request:read", [403, 403, 200]),  # RFC 6749 separates scopes by spaces alone.
        ("", [403, 403, 200]),
        (None, [403, 403, 200]),
    ],
)
async def test_each_endpoint_needs_its_scope(client, issuer, scope, statuses):
    responses = await ask(client, bearer(issuer.token(scope=scope)))

    assert [response.status_code for response in responses] == statuses
    for response, needed in zip(responses, ("write", "read", ""), strict=True):
        if response.status_code == 403:
            assert 'error="insufficient_scope"' in response.headers["WWW-Authenticate"]
            assert f' scope="request:{needed}"' in response.headers["WWW-Authenticate"]
            assert response.json()["errors"][0]["code"] == "insufficient_scope"


async def test_token_is_accepted_until_the_end_of_the_leeway_and_then_forgotten(service_settings, issuer):
    async with api_client(service_settings, None, auth_leeway_seconds=2.0) as client:

        async def an_expired_token_is_accepted() -> bool:
            client.headers.update(bearer(issuer.token(exp=int(time.time()))))
            return (await client.get(STRUCTURE)).status_code == 200

        await eventually(an_expired_token_is_accepted)  # the first, unless the machine is slow
        await eventually(lambda: is_refused(client))


async def test_use_does_not_prolong_the_trust_in_a_withdrawn_key(service_settings, own_issuer, monkeypatch):
    monkeypatch.setattr(authenticator, "_LONGEST_CACHED_SECONDS", 1.0)
    keys = SigningKeys(own_issuer.jwks.as_uri())
    remembered, new = own_issuer.token(), own_issuer.token(jti="never seen before")
    async with open_pool(service_settings) as pool:
        verifier = Authenticator(service_settings, keys, pool)

        def is_refused(token: str) -> bool:
            try:
                verifier.verify_access_token(token, scope=READ)
            except InvalidCredentials:
                return True
            return False

        await keys.refresh()
        assert not is_refused(remembered)
        own_issuer.publish("next")  # and the key "local" no more
        await keys.refresh()

        assert is_refused(new)
        assert not is_refused(remembered)
        await eventually(lambda: is_refused(remembered))


async def is_refused(client: httpx.AsyncClient) -> bool:
    return (await client.get(STRUCTURE)).status_code == 401


async def test_api_key_opens_the_questionnaire_even_without_the_issuers_keys_and_nothing_else(
    service_settings, database
):
    key = await api_keys.create(database, CONVEYANCER)
    stored = await database.fetchval("SELECT string_agg(k::text, '') FROM api_key AS k")
    made_up = bearer("cr_0123456789ab_" + "x" * 43)

    async with api_client(service_settings, None, auth_jwks_url="file:///nowhere/jwks.json") as client:
        create, retrieve, questionnaire = await ask(client, bearer(key))
        refused = await client.get(STRUCTURE, headers=made_up)

    assert (questionnaire.status_code, refused.status_code) == (200, 401)
    for response in (create, retrieve):
        assert response.status_code == 401
        assert "API key" in response.headers["WWW-Authenticate"]
    assert key.split("_", 2)[2] not in stored
