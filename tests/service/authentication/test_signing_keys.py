"""The issuer's keys: what is used of a JWK set (RFC 7517, 7518 and 8725), and how it is fetched."""

import asyncio
import gzip
import hashlib
import itertools
import json
import time
from functools import cache
from http import HTTPStatus
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from jwt.utils import to_base64url_uint
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

from service.authentication import signing_keys
from service.authentication.access_tokens import AccessTokens, InvalidCredentials
from service.authentication.signing_keys import SigningKeys, SigningKeysUnavailable
from service.server.background import in_background
from tests.harness.issuer import HttpsIssuer, Issuer, api_settings, endless, status
from tests.harness.loopback_server import Answer
from tests.harness.waiting import eventually

_MAKE: dict[str, tuple[Any, Any, str]] = {
    "RSA": (RSAAlgorithm, lambda: rsa.generate_private_key(65_537, 2048), "RS256"),
    "RSA of 1024 bits": (RSAAlgorithm, lambda: rsa.generate_private_key(65_537, 1024), "RS256"),  # noqa: S505
    "P-256": (ECAlgorithm, lambda: ec.generate_private_key(ec.SECP256R1()), "ES256"),
    "P-384": (ECAlgorithm, lambda: ec.generate_private_key(ec.SECP384R1()), "ES384"),
    "P-521": (ECAlgorithm, lambda: ec.generate_private_key(ec.SECP521R1()), "ES512"),
    "secp256k1": (ECAlgorithm, lambda: ec.generate_private_key(ec.SECP256K1()), "ES256K"),
    "Ed25519": (OKPAlgorithm, ed25519.Ed25519PrivateKey.generate, "EdDSA"),
    "Ed448": (OKPAlgorithm, ed448.Ed448PrivateKey.generate, "EdDSA"),
}
OF_RSA = {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}
OF_ED_25519 = {"EdDSA", "Ed25519"}


@cache
def private_key(kind: str, number: int = 0) -> Any:  # noqa: ARG001 - keys with different numbers differ
    return _MAKE[kind][1]()


def public(kind: str, number: int = 0, *, key_id: str = "the key", **members: Any) -> dict[str, Any]:
    """Return the JWK of a key's public half with these members. A member of ... is left out."""
    jwk = _MAKE[kind][0].to_jwk(private_key(kind, number).public_key(), as_dict=True)
    jwk = {name: value for name, value in jwk.items() if name != "key_ops"} | {"kid": key_id} | members
    return {name: value for name, value in jwk.items() if value is not ...}


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


def named(logs: list[Any], event: str, value: str) -> list[Any]:
    return [line[value] for line in logs if line["event"] == event]


@pytest.mark.parametrize(
    ("kind", "members", "signing", "accepted"),
    [
        ("RSA", {}, OF_RSA, OF_RSA),
        ("RSA", {"alg": "PS256"}, OF_RSA, {"PS256"}),
        ("RSA", {"use": "sig", "alg": "RS256", "key_ops": ["verify"]}, OF_RSA, {"RS256"}),
        ("RSA", {"use": None, "alg": "", "key_ops": ["sign", "verify"]}, OF_RSA, OF_RSA),
        # Some serializers write nulls.
        ("RSA", dict.fromkeys(("use", "alg", "key_ops", "x5c", "d", "crv")), OF_RSA, OF_RSA),
        ("P-384", {"x5c": ["A" * 500_000], "x5t": 7, "unheard of": {"a": [[[]]]}}, {"ES384"}, {"ES384"}),
        ("P-521", {"alg": "ES512"}, {"ES512"}, {"ES512"}),
        *(("Ed25519", {"alg": each}, OF_ED_25519, {each}) for each in sorted(OF_ED_25519)),
        ("Ed25519", {}, OF_ED_25519, OF_ED_25519),
        ("Ed448", {"alg": "EdDSA"}, {"EdDSA"}, {"EdDSA"}),
    ],
)
async def test_key_that_fits_verifies_its_algorithms(own_issuer, kind, members, signing, accepted):
    with capture_logs() as logs:
        tokens = await trusting(own_issuer, public(kind, **members))

    assert {each for each in signing if accepts(tokens, token(own_issuer, kind, 0, each))} == accepted
    assert [line for line in logs if line["log_level"] != "debug"] == []


# What is published, and what the log says of it. A token that its private half signs is refused.
UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("RSA of 1024 bits", {}, "1024 bits"),
    ("RSA", {"n": integer(2**16_383 + 1)}, "16384 bits"),
    ("RSA", {"e": integer(2**32 + 1)}, "too large an exponent"),
    ("RSA", {"e": integer(1)}, "e must be"),
    *(("RSA", each, "its use or key_ops is not for") for each in ({"use": "enc"}, {"key_ops": ["encrypt"]})),
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
@pytest.mark.parametrize(("kind", "members", "why"), UNFIT)
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
    not_used = named(logs, "signing_keys_not_used", "keys")
    assert [[*each] for each in not_used] == [["the key"], ["the key"], ["local"], ["local"]]
    assert all(why in reason for each in not_used for reason in each.values())


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
)
async def test_entry_that_is_no_key_does_not_affect_the_others(own_issuer, entry, name, why):
    with capture_logs() as logs:
        tokens = await trusting(own_issuer, entry, good(own_issuer), entry)

    assert accepts(tokens, own_issuer.token())
    [not_used] = named(logs, "signing_keys_not_used", "keys")
    assert not_used.keys() == {name}
    assert why in not_used[name]


async def test_keys_with_one_id_are_tried_in_any_order(own_issuer):
    """Keycloak lists a key once for each algorithm. Other issuers keep the id when they replace the key."""
    replaced = [public("P-256", number, alg="ES256") for number in range(2)]
    once_for_each = [*(public("RSA", alg=name) for name in ("RS256", "RS384", "RS512")), replaced[0]]

    for first in range(len(once_for_each)):
        published = once_for_each[first:] + once_for_each[:first]
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


@pytest.fixture
async def server(authority, own_issuer):
    """The issuer's key server, up, and trusted through SSL_CERT_FILE as in production."""
    async with HttpsIssuer(authority) as https:
        https.answer = status(200, own_issuer.jwks.read_bytes())
        yield https


def is_found(keys: SigningKeys, key_id: str) -> bool:
    try:
        return keys.find(key_id) is not None
    except SigningKeysUnavailable:
        return False


def publish_next(https: HttpsIssuer, issuer: Issuer) -> None:
    issuer.publish("next")
    https.answer = status(200, issuer.jwks.read_bytes())


async def test_first_uses_of_a_new_key_cause_one_fetch_and_a_retry_finds_it(server, own_issuer, monkeypatch):
    monkeypatch.setattr(signing_keys, "_FRESH_SECONDS", 0.0)
    keys = SigningKeys(server.url)
    await keys.refresh()
    publish_next(server, own_issuer)
    monkeypatch.setattr(signing_keys, "_INTERVAL_SECONDS", 0.0)

    for key_id in ["next"] + [f"made-up-{number}" for number in range(100)]:
        with pytest.raises(SigningKeysUnavailable):
            keys.find(key_id)
    await keys.refresh()  # waits for the fetch that runs

    assert is_found(keys, "next")
    assert not is_found(keys, "local")
    assert server.requests == 2


@pytest.mark.parametrize("is_up", [True, False], ids=["fetches succeed", "fetches fail"])
async def test_unknown_keys_cause_no_more_than_one_fetch_in_each_interval(server, monkeypatch, is_up):
    monkeypatch.setattr(signing_keys, "_INTERVAL_SECONDS", 0.3)
    if not is_up:
        server.answer = status(500)
    keys, numbers, began = SigningKeys(server.url), itertools.count(), time.monotonic()

    def four_fetches() -> bool:
        return not is_found(keys, f"made-up-{next(numbers)}") and server.requests == 4

    await eventually(four_fetches)

    assert time.monotonic() - began >= 3 * 0.3 - 0.01


async def test_fetch_that_began_before_a_key_was_published_is_not_the_last_word(server, own_issuer):
    keys, answer, is_published = SigningKeys(server.url), server.answer, asyncio.Event()

    async def answer_late(writer: asyncio.StreamWriter) -> None:
        await is_published.wait()
        writer.write(answer)

    server.answer = answer_late
    fetching = asyncio.create_task(keys.refresh())
    await eventually(lambda: server.requests == 1)
    publish_next(server, own_issuer)
    is_published.set()

    await fetching
    assert await eventually(lambda: is_found(keys, "next"))


@pytest.mark.parametrize("has_keys", [True, False], ids=["keys were fetched", "it starts in the outage"])
async def test_keys_stay_in_use_during_an_outage(authority, own_issuer, monkeypatch, has_keys):
    for pause in ("_REFRESH_SECONDS", "_COOLDOWN_SECONDS", "_INTERVAL_SECONDS", "_FRESH_SECONDS"):
        monkeypatch.setattr(signing_keys, pause, 0.05)
    https = HttpsIssuer(authority)
    https.answer = status(200, own_issuer.jwks.read_bytes())
    async with https:
        keys = SigningKeys(https.url)
        if has_keys:
            await keys.refresh()
    before = https.requests

    with capture_logs() as logs:
        async with in_background("signing_keys", keys.run):
            await eventually(lambda: len(named(logs, "signing_keys_not_fetched", "event")) >= 3)
            assert is_found(keys, "local") == has_keys
            with pytest.raises(SigningKeysUnavailable):  # It may be a new key.
                keys.find("next")
            publish_next(https, own_issuer)
            async with https:
                await eventually(lambda: https.requests > before)
                assert await eventually(lambda: is_found(keys, "next"))


WRONG: dict[str, Answer | None] = {
    "500": status(500),
    "no body": status(200),
    "not JSON": status(200, b"<html>"),
    "not UTF-8": status(200, b'{"keys": [{"kid": "\xff"}]}'),
    "too deep": status(200, b'{"keys": [{"kid":' + b"[" * 50_000),
    "no usable key": status(200, b'{"keys": [{"kty": "oct", "k": "AAAA", "kid": "local"}]}'),
    "not HTTP": b"\x00\xff nonsense\r\n\r\n",
    "endless": endless(b"Connection: close", b" " * 65_536),
    "dripping": endless(b"Content-Length: 100000", b" ", 0.02),
    "none": None,
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
async def test_wrong_answer_keeps_the_cached_keys_and_the_fetch_ends_in_time(server, answer, monkeypatch):
    monkeypatch.setattr(signing_keys, "_FRESH_SECONDS", 0.0)
    keys = SigningKeys(server.url)
    await keys.refresh()
    monkeypatch.setattr(signing_keys, "_FETCH_SECONDS", 0.2)
    server.answer = answer

    with capture_logs() as logs, pytest.raises(SigningKeysUnavailable):
        await keys.refresh()

    assert is_found(keys, "local")
    assert named(logs, "signing_keys_not_fetched", "keys_kept") == [1]
    with pytest.raises(SigningKeysUnavailable) as raised:  # It may be a new key.
        keys.find("next")
    assert raised.value.__cause__, "logged as the reason"


async def test_document_is_not_read_if_it_is_compressed_too_large_or_elsewhere(server, own_issuer):
    document = own_issuer.jwks.read_bytes()
    compressed = gzip.compress(document)
    answers = [
        status(200, compressed, "Content-Encoding: gzip"),
        status(200, gzip.compress(compressed), "Content-Encoding: gzip, gzip"),
        status(200, document + b" " * 1024 * 1024),
        status(HTTPStatus.TEMPORARY_REDIRECT, b"", f"Location: {server.url}?moved"),
    ]
    for number, answer in enumerate(answers, 1):
        server.answer = answer
        with pytest.raises(SigningKeysUnavailable):
            await SigningKeys(server.url).refresh()
        assert server.requests == number
