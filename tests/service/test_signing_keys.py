"""The issuer's keys: fetched, kept while it is down, replaced when it rotates them."""

import json

import msgspec
import pytest
from structlog.testing import capture_logs

from service.background import in_background
from service.signing_keys import SigningKeys, SigningKeysUnavailable, UnknownSigningKey
from tests.conftest import Issuer, eventually


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
async def test_document_without_a_usable_key_is_no_answer(own_issuer: Issuer, document: bytes) -> None:
    own_issuer.jwks.write_bytes(document)

    with pytest.raises(SigningKeysUnavailable):
        await signing_keys(own_issuer).find("local")


async def test_unusable_keys_take_nothing_from_the_others(own_issuer: Issuer) -> None:
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
