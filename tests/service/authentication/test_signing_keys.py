"""The issuer's keys: fetched, kept while the issuer is down, replaced when they are rotated."""

import json

import msgspec
import pytest
from jwt.algorithms import ECAlgorithm
from structlog.testing import capture_logs

from service.authentication.signing_keys import SigningKeys, SigningKeysUnavailable, UnknownSigningKey
from service.server.background import in_background
from tests.harness.issuer import Issuer
from tests.harness.waiting import eventually


def signing_keys(issuer: Issuer) -> SigningKeys:
    return SigningKeys(issuer.jwks.as_uri(), refresh_seconds=0.02, timeout_seconds=5.0, cooldown_seconds=10.0)


async def test_key_is_found_without_waiting_for_the_background(own_issuer: Issuer) -> None:
    key = await signing_keys(own_issuer).find("local")

    assert key.key_id == "local"


async def test_rotated_key_is_found_by_the_background(own_issuer: Issuer) -> None:
    keys = signing_keys(own_issuer)
    await keys.find("local")
    own_issuer.publish("next")

    async def found() -> bool:
        try:
            return (await keys.find("next")).key_id == "next"
        except UnknownSigningKey:
            return False

    async with in_background("signing_keys", keys.run):
        assert await eventually(found)


async def test_keys_are_kept_while_the_issuer_is_down(own_issuer: Issuer) -> None:
    keys = signing_keys(own_issuer)
    await keys.find("local")
    own_issuer.jwks.unlink()

    with capture_logs() as logs:
        async with in_background("signing_keys", keys.run):
            await eventually(lambda: any(line["event"] == "signing_keys_not_fetched" for line in logs))

    assert (await keys.find("local")).key_id == "local"


@pytest.mark.parametrize(
    "document",
    [b"", b"not json", b"[]", b'{"keys": []}', b'{"keys": [{"kty": "oct", "k": "AAAA", "kid": "local"}]}'],
)
async def test_document_without_a_usable_key_counts_as_a_failed_fetch(
    own_issuer: Issuer, document: bytes
) -> None:
    own_issuer.jwks.write_bytes(document)

    with pytest.raises(SigningKeysUnavailable):
        await signing_keys(own_issuer).find("local")


@pytest.mark.parametrize(
    "odd",
    [
        {"kty": "oct"},
        {"kty": "oct", "k": 7, "kid": "odd"},
        {"kty": "EC", "alg": "none", "kid": "odd"},
        {"kty": "RSA", "alg": "none", "kid": "odd"},
        {"kty": "RSA", "n": "", "e": "", "kid": "odd"},
        {"kty": "RSA", "n": "AQAB", "e": "AQAB", "d": "AQAB", "oth": 1, "kid": "odd"},
        {"kty": ["EC"], "kid": "odd"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "odd"},
        {"kty": "OKP", "crv": "X25519", "x": "AA", "kid": "odd"},
    ],
)
async def test_malformed_key_does_not_affect_the_others(own_issuer: Issuer, odd: dict[str, object]) -> None:
    (good,) = json.loads(own_issuer.jwks.read_text())["keys"]
    own_issuer.jwks.write_bytes(msgspec.json.encode({"keys": [odd, good]}))
    keys = signing_keys(own_issuer)

    assert (await keys.find("local")).key_id == "local"
    with pytest.raises(UnknownSigningKey):
        await keys.find("odd")


async def test_unforeseen_failure_of_a_fetch_is_logged() -> None:
    keys = SigningKeys("file:///a%00b", refresh_seconds=1.0, timeout_seconds=5.0, cooldown_seconds=10.0)

    with capture_logs() as logs, pytest.raises(SigningKeysUnavailable):
        await keys.find("local")

    assert [line["event"] for line in logs] == ["signing_keys_not_fetched"]


async def test_key_published_with_its_private_half_is_not_used(own_issuer: Issuer) -> None:
    private = {**ECAlgorithm.to_jwk(own_issuer.key, as_dict=True), "kid": "private"}
    (good,) = json.loads(own_issuer.jwks.read_text())["keys"]
    own_issuer.jwks.write_bytes(msgspec.json.encode({"keys": [private, good]}))

    with pytest.raises(UnknownSigningKey):
        await signing_keys(own_issuer).find("private")


async def test_unusable_keys_do_not_affect_the_others(own_issuer: Issuer) -> None:
    published = json.loads(own_issuer.jwks.read_text())
    others = [{"kty": "nonsense"}, {"kty": "oct", "k": "AAAA", "kid": "shared"}, {}]
    encryption = {**published["keys"][0], "kid": "encryption", "use": "enc"}
    mistyped = [
        {**published["keys"][0], "kid": "mistyped", member: ["ES256"]} for member in ("alg", "crv", "x")
    ]
    own_issuer.jwks.write_bytes(
        msgspec.json.encode({"keys": [*others, encryption, *mistyped, *published["keys"]]})
    )
    keys = signing_keys(own_issuer)

    assert (await keys.find("local")).key_id == "local"
    for key_id in ("shared", "encryption", "mistyped"):
        with pytest.raises(UnknownSigningKey):
            await keys.find(key_id)
