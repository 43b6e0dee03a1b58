"""The issuer's keys over real HTTPS: rotation, outage, recovery, slow and wrong answers."""

import asyncio
import gzip
import itertools
import time
from http import HTTPStatus
from typing import Any

import pytest
from structlog.testing import capture_logs

from service.authentication import signing_keys
from service.authentication.signing_keys import SigningKeys, SigningKeysUnavailable
from service.server.background import in_background
from tests.harness.fixed_answers import Answer
from tests.harness.issuer import HttpsIssuer, after, babble, drip, pour, status
from tests.harness.waiting import eventually


@pytest.fixture
async def server(authority, own_issuer):
    """The issuer's key server, up, and trusted through SSL_CERT_FILE as in production."""
    https = HttpsIssuer(authority)
    https.answer = status(200, own_issuer.jwks.read_bytes())
    async with https:
        yield https


@pytest.fixture
def outdated(monkeypatch):
    """Take keys for outdated as soon as they are fetched."""
    monkeypatch.setattr(signing_keys, "_FRESH_SECONDS", 0.0)


def is_found(keys: SigningKeys, key_id: str) -> bool:
    try:
        return keys.find(key_id) is not None
    except SigningKeysUnavailable:
        return False


@pytest.mark.usefixtures("outdated")
async def test_first_uses_of_a_new_key_cause_one_fetch_and_a_retry_finds_it(server, own_issuer, monkeypatch):
    keys = SigningKeys(server.url)
    await keys.refresh()
    own_issuer.publish("next")
    server.answer = status(200, own_issuer.jwks.read_bytes())
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
    keys = SigningKeys(server.url)
    numbers = itertools.count()
    began = time.monotonic()

    def four_fetches() -> bool:
        return not is_found(keys, f"made-up-{next(numbers)}") and server.requests == 4

    await eventually(four_fetches)

    assert time.monotonic() - began >= 3 * 0.3 - 0.01


async def test_fetch_that_began_before_a_key_was_published_is_not_the_last_word(server, own_issuer):
    keys = SigningKeys(server.url)
    server.answer = after(0.2, server.answer)
    fetching = asyncio.create_task(keys.refresh())
    await eventually(lambda: server.requests == 1)
    own_issuer.publish("next")
    server.answer = status(200, own_issuer.jwks.read_bytes())

    await fetching
    assert await eventually(lambda: is_found(keys, "next"))


@pytest.mark.parametrize("has_keys", [True, False], ids=["keys were fetched", "it starts in the outage"])
async def test_keys_stay_in_use_during_an_outage_and_are_fetched_after_it_without_a_caller(
    authority, own_issuer, monkeypatch, has_keys
):
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
            await eventually(lambda: len(failures(logs)) >= 3)
            assert is_found(keys, "local") == has_keys
            with pytest.raises(SigningKeysUnavailable):  # It may be a new key.
                keys.find("next")
            own_issuer.publish("next")
            https.answer = status(200, own_issuer.jwks.read_bytes())
            async with https:
                await eventually(lambda: https.requests > before)
                assert await eventually(lambda: is_found(keys, "next"))


WRONG: dict[str, Answer] = {
    "500": status(500),
    "no body": status(200),
    "not JSON": status(200, b"<html>"),
    "not UTF-8": status(200, b'{"keys": [{"kid": "\xff"}]}'),
    "too deep": status(200, b'{"keys": [{"kid":' + b"[" * 50_000),
    "no usable key": status(200, b'{"keys": [{"kty": "oct", "k": "AAAA", "kid": "local"}]}'),
    "not HTTP": babble,
    "endless": pour,
    "dripping": drip,
    "late": after(10, status(200)),
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
@pytest.mark.usefixtures("outdated")
async def test_wrong_answer_keeps_the_cached_keys_and_the_fetch_ends_in_time(server, answer, monkeypatch):
    keys = SigningKeys(server.url)
    await keys.refresh()
    monkeypatch.setattr(signing_keys, "_FETCH_SECONDS", 0.2)
    server.answer = answer

    with capture_logs() as logs, pytest.raises(SigningKeysUnavailable):
        await keys.refresh()

    assert is_found(keys, "local")
    assert [line["keys_kept"] for line in failures(logs)] == [1]
    with pytest.raises(SigningKeysUnavailable) as raised:  # It may be a new key.
        keys.find("next")
    assert raised.value.__cause__, "logged as the reason"


@pytest.mark.parametrize("refused", ["compressed", "compressed twice", "too large", "elsewhere"])
async def test_document_is_not_read_if_it_is_compressed_too_large_or_elsewhere(server, own_issuer, refused):
    document = own_issuer.jwks.read_bytes()
    compressed = gzip.compress(document)
    server.answer = {
        "compressed": status(200, compressed, "Content-Encoding: gzip"),
        "compressed twice": status(200, gzip.compress(compressed), "Content-Encoding: gzip, gzip"),
        "too large": status(200, document + b" " * 1024 * 1024),
        "elsewhere": status(HTTPStatus.TEMPORARY_REDIRECT, b"", f"Location: {server.url}?moved"),
    }[refused]

    with pytest.raises(SigningKeysUnavailable):
        await SigningKeys(server.url).refresh()

    assert server.requests == 1


def failures(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"] == "signing_keys_not_fetched"]
