"""JWK sets with doubled, wrong, forbidden and huge keys (RFC 7517, 7518 and 8725), beside a good one."""

import hashlib
import itertools
import json
from functools import cache
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from jwt.utils import to_base64url_uint
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

from service.authentication.access_tokens import AccessTokens, InvalidCredentials
from service.authentication.signing_keys import SigningKeys
from tests.harness.issuer import Issuer, api_settings

_MAKE: dict[str, tuple[Any, Any, str]] = {
    "RSA": (RSAAlgorithm, lambda: rsa.generate_private_key(65_537, 2048), "RS256"),
    "RSA of 1024 bits": (RSAAlgorithm, lambda: rsa.generate_private_key(65_537, 1024), "RS256"),  # noqa: S505
    "P-256": (ECAlgorithm, lambda: ec.generate_private_key(ec.SECP256R1()), "ES256"),
    "P-384": (ECAlgorithm, lambda: ec.generate_private_key(ec.SECP384R1()), "ES384"),
    "secp256k1": (ECAlgorithm, lambda: ec.generate_private_key(ec.SECP256K1()), "ES256K"),
    "Ed25519": (OKPAlgorithm, ed25519.Ed25519PrivateKey.generate, "EdDSA"),
    "Ed448": (OKPAlgorithm, ed448.Ed448PrivateKey.generate, "EdDSA"),
}


@cache
def private_key(kind: str, number: int = 0) -> Any:  # noqa: ARG001 - keys with different numbers differ
    return _MAKE[kind][1]()


def public(kind: str, number: int = 0, *, key_id: str = "the key", **members: Any) -> dict[str, Any]:
    """Return the JWK of a key's public half with these members. A member of ... is left out."""
    jwk = _MAKE[kind][0].to_jwk(private_key(kind, number).public_key(), as_dict=True)
    jwk = {name: value for name, value in jwk.items() if name != "key_ops"} | {"kid": key_id} | members
    return {name: value for name, value in jwk.items() if value is not ...}


def _short(value: object) -> str:
    return repr(value)[:60]


def integer(number: int) -> str:
    return to_base64url_uint(number).decode()


def token(issuer: Issuer, kind: str, number: int = 0, algorithm: str | None = None) -> str:
    claims = jwt.decode(issuer.token(), options={"verify_signature": False})
    headers = {"typ": "at+jwt", "kid": "the key"}
    return jwt.encode(claims, private_key(kind, number), algorithm or _MAKE[kind][2], headers=headers)


async def trusting(issuer: Issuer, *entries: Any) -> AccessTokens:
    """Publish entries, which are JSON as bytes or what JSON is made of. Return what verifies tokens."""
    encoded = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in entries]
    document = b'{"keys": [' + b",".join(encoded) + b"]}"
    # A file of its own: a set that is fetched again by a token with an unknown key has not changed.
    published = issuer.jwks.with_name(hashlib.sha256(document).hexdigest())
    published.write_bytes(document)
    keys = SigningKeys(published.as_uri())
    await keys.refresh()
    return AccessTokens(api_settings("postgresql://nowhere", issuer), keys)


def accepts(tokens: AccessTokens, access_token: str) -> bool:
    try:
        return bool(tokens.verify(access_token))
    except InvalidCredentials:
        return False


def good(issuer: Issuer) -> Any:
    """Return the issuer's own key, whose id is "local"."""
    return json.loads(issuer.jwks.read_bytes())["keys"][0]


FITTING: list[tuple[str, dict[str, Any]]] = [
    ("RSA", {}),
    ("RSA", {"use": "sig", "alg": "RS256", "key_ops": ["verify"]}),
    ("RSA", {"use": None, "alg": "", "key_ops": ["sign", "verify"]}),
    ("RSA", dict.fromkeys(("use", "alg", "key_ops", "x5c", "d", "crv"))),  # Some serializers write nulls.
    ("P-384", {"x5c": ["A" * 500_000], "x5t": 7, "unheard of": {"a": [[[]]]}}),
    ("Ed448", {"alg": "EdDSA"}),
]


@pytest.mark.parametrize(("kind", "members"), FITTING, ids=_short)
async def test_key_that_fits_is_used_and_nothing_is_logged(own_issuer, kind, members):
    with capture_logs() as logs:
        tokens = await trusting(own_issuer, public(kind, **members))

    assert accepts(tokens, token(own_issuer, kind))
    assert [line for line in logs if line["log_level"] != "debug"] == []


# What is published, and what the log says of it. A token that its private half signs is refused.
UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("RSA of 1024 bits", {}, "1024 bits"),
    ("RSA", {"n": integer(2**16_383 + 1)}, "16384 bits"),
    ("RSA", {"e": integer(2**32 + 1)}, "too large an exponent"),
    ("RSA", {"e": integer(1)}, "e must be"),
    ("RSA", {"use": "enc"}, "its use or key_ops is not for"),
    ("RSA", {"key_ops": ["encrypt"]}, "its use or key_ops is not for"),
    ("RSA", {"alg": "HS256"}, "Not an HMAC key"),
    ("RSA", {"alg": "none"}, "NotImplementedError"),
    ("RSA", {"alg": "ES256"}, "Not an Elliptic curve key"),
    ("RSA", {"d": integer(7)}, "it is not public"),
    ("P-256", {"d": "AA"}, "it is not public"),
    ("P-256", {"x": "AA", "y": "AA"}, "32 bytes"),
    ("P-256", {"crv": "P-384"}, "48 bytes"),
    ("P-256", {"kty": "oct", "k": "AAAA", "alg": "HS256"}, "it is not public"),
    ("P-256", {"kty": "AKP"}, "Unsupported kty"),
    ("P-384", {"alg": "ES256"}, "does not match the expected curve"),
    ("secp256k1", {}, "its algorithm is not accepted"),
    ("Ed25519", {"crv": "X25519"}, "Unsupported crv"),
]


@pytest.mark.filterwarnings("ignore:The RSA key is 1024 bits")
@pytest.mark.parametrize(("kind", "members", "why"), UNFIT, ids=_short)
async def test_unfit_key_is_not_used_and_named_in_the_log_once(own_issuer, kind, members, why):
    ours, unfit = good(own_issuer), public(kind, **members)
    same_id = unfit | {"kid": "local"}

    with capture_logs() as logs:
        all_tokens = [
            await trusting(own_issuer, *published)
            for published in [(unfit, ours), (ours, unfit), (same_id, ours), (ours, same_id)]
        ]

    assert all(accepts(each, own_issuer.token()) for each in all_tokens)
    assert not any(accepts(each, token(own_issuer, kind)) for each in all_tokens)
    named = [line["keys"] for line in logs if line["event"] == "signing_keys_not_used"]
    assert [[*each] for each in named] == [["the key"], ["the key"], ["local"], ["local"]]
    assert all(why in reason for each in named for reason in each.values())


@pytest.mark.parametrize(
    ("entry", "name", "why"),
    [
        (b"null", "(no kid)", "Expected `object`, got `null`"),
        (b'{"kid": null, "kty": "EC"}', "(no kid)", "Expected `str`, got `null`"),
        (b'{"kid": "one", "kid": "other"}', "other", "kty is not found"),
        (b'{"kid": "%s"}' % (b"k" * 10_000), "k" * 100, "kty is not found"),
        (b'{"kid": "odd", "n": %s}' % (b"9" * 100_000), "(no kid)", "out of range"),
        (b'{"kid": "\xff"}', "(no kid)", "can't decode byte 0xff"),
        (b'{"kid": "odd", "x": %s}' % (b"[" * 500 + b"]" * 500), "odd", "kty is not found"),
    ],
    ids=_short,
)
async def test_entry_that_is_no_key_does_not_affect_the_others(own_issuer, entry, name, why):
    with capture_logs() as logs:
        tokens = await trusting(own_issuer, entry, good(own_issuer), entry)

    assert accepts(tokens, own_issuer.token())
    [named] = [line["keys"] for line in logs if line["event"] == "signing_keys_not_used"]
    assert named.keys() == {name}
    assert why in named[name]


async def test_keys_with_one_id_are_tried_in_any_order(own_issuer):
    """Keycloak lists a key once for each algorithm. Other issuers keep the id when they replace the key."""
    once_for_each = [public("RSA", alg=name) for name in ("RS256", "RS384", "RS512")]
    replaced = [public("P-256", number, alg="ES256") for number in range(2)]

    for published in itertools.permutations([*once_for_each, replaced[0]]):
        tokens = await trusting(own_issuer, *published, *published, *reversed(replaced))
        assert all(accepts(tokens, token(own_issuer, "RSA", 0, f"RS{bits}")) for bits in (256, 384, 512))
        assert all(accepts(tokens, token(own_issuer, "P-256", number)) for number in range(2))
        assert not accepts(tokens, token(own_issuer, "RSA", 1, "RS256"))
        assert not accepts(tokens, token(own_issuer, "RSA", 0, "PS256"))


async def test_thousands_of_useless_entries_cost_one_line_and_no_key(own_issuer):
    useless = [b'{"kid": "%d", "kty": "RSA"}' % number for number in range(29_000)]
    doubled = [json.dumps(good(own_issuer)).encode()] * 1000
    published = [*useless, *doubled, public("P-256", key_id="local"), public("RSA")]

    with capture_logs([merge_contextvars]) as logs, bound_contextvars(http_request_id="of the caller"):
        tokens = await trusting(own_issuer, *published)
        await tokens._signing_keys.refresh()  # noqa: SLF001 - what the API does every five minutes

    assert accepts(tokens, own_issuer.token())
    assert accepts(tokens, token(own_issuer, "RSA"))
    [line] = [line for line in logs if line["log_level"] != "debug"]
    assert (len(line["keys"]), line.get("http_request_id")) == (20, None)
