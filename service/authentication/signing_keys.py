"""The issuer's signing keys: its JWK set (RFC 7517), cached and refreshed."""

import asyncio
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import jwt
import msgspec
import structlog
from jwt.algorithms import AllowedPublicKeys, OKPAlgorithm

from service.addresses import connect_to_any
from service.telemetry import api_metrics

_ED_25519 = "Ed25519"  # RFC 9864: EdDSA, limited to this curve
# What a key without `alg` is for, by the algorithm that PyJWT assumes. Others have one algorithm per curve.
_OF_TYPE = {
    "RS256": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EdDSA": ("EdDSA", _ED_25519),
}
ALGORITHMS = (*_OF_TYPE["RS256"], "ES256", "ES384", "ES512", *_OF_TYPE["EdDSA"])
_REFRESH_SECONDS = 300.0  # between regular fetches, so that a withdrawn key is soon dropped
_FETCH_SECONDS = 5.0  # for one fetch
_INTERVAL_SECONDS = 1.0  # the least time between two fetches, because any made-up key id causes one
_COOLDOWN_SECONDS = 10.0  # from a failed fetch to the next regular one
# How long after a fetch an unknown key is refused: longer than Retry-After, so that a retry ends in a 401.
_FRESH_SECONDS = 10.0
_LARGEST_DOCUMENT = 1024 * 1024

_log = structlog.get_logger()

with suppress(ValueError):  # PyJWT 2.15 lacks it. A release that has it raises ValueError.
    jwt.register_algorithm(_ED_25519, OKPAlgorithm())


class SigningKeysUnavailable(Exception):
    """The issuer's keys cannot be fetched now, so the token can be neither accepted nor refused."""


class SigningKey(msgspec.Struct, frozen=True):
    """A public key of the issuer, and the algorithms accepted with it, all of which suit the key's type."""

    public_key: AllowedPublicKeys
    algorithms: tuple[str, ...]


class SigningKeys:
    """The issuer's public keys by key id. While the issuer is down, the last fetched keys stay in use."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tls = ssl.create_default_context()
        self._by_id: dict[str, SigningKey] = {}
        self._failure: Exception | None = jwt.PyJWKSetError("not fetched yet")  # of the last fetch
        self._fetching: asyncio.Task[None] | None = None
        self._last_attempt = float("-inf")
        self._fetched_at = float("-inf")  # when the last fetch that succeeded began
        api_metrics.jwks_age.set_function(lambda: time.monotonic() - self._fetched_at)

    def find(self, key_id: str) -> SigningKey | None:
        """Return the key with this id, or None if the issuer does not have it. Raises SigningKeysUnavailable.

        An unknown id may belong to a new key, so it starts a fetch, at most one each second. No caller waits
        for the fetch: anybody can make up ids, and waiting callers would hold all connections.
        """
        key = self._by_id.get(key_id)
        if key is None:
            now = time.monotonic()
            if now - self._last_attempt >= _INTERVAL_SECONDS:
                self._fetch()
            if now - self._fetched_at >= _FRESH_SECONDS:
                # None would become a 401, and callers would discard a token that may be valid.
                raise SigningKeysUnavailable from self._failure
        return key

    async def refresh(self) -> None:
        """Fetch the keys, and wait for the result. Raises SigningKeysUnavailable if the fetch fails."""
        await asyncio.wait([self._fetch()])
        if self._failure:
            raise SigningKeysUnavailable from self._failure

    async def run(self) -> None:
        """Fetch the keys at intervals until cancelled."""
        try:
            while True:
                await asyncio.sleep(_COOLDOWN_SECONDS if self._failure else _REFRESH_SECONDS)
                with suppress(SigningKeysUnavailable):  # The failure was logged.
                    await self.refresh()
        finally:
            if self._fetching is not None:
                self._fetching.cancel()

    def _fetch(self) -> asyncio.Task[None]:
        """Return the running fetch, or start one. Concurrent callers share it."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._replace())
        return self._fetching

    async def _replace(self) -> None:
        try:
            self._last_attempt = began = time.monotonic()
            async with asyncio.timeout(_FETCH_SECONDS):
                document = await connect_to_any(self._download, seconds=_FETCH_SECONDS)
            self._by_id, self._fetched_at = _read_jwk_set(document), began
        except Exception as error:  # noqa: BLE001 - whatever the failure, the cached keys stay in use
            self._failure = error
            _log.warning("signing_keys_not_fetched", error=type(error).__name__, keys_kept=len(self._by_id))
        else:
            self._failure = None
            _log.debug("signing_keys_fetched", keys=len(self._by_id))
        finally:
            self._fetching = None

    async def _download(self) -> bytes:
        """Return the document at an https or file URL. The settings allow no other scheme.

        Redirects are not followed, because they may lead to plain HTTP, where anyone could replace the keys.
        """
        address = urlsplit(self._url)
        if address.scheme == "file":
            return await asyncio.to_thread(Path(unquote(address.path)).read_bytes)
        client = httpx.AsyncClient(
            verify=self._tls, timeout=_FETCH_SECONDS, headers={"Accept-Encoding": "identity"}
        )
        document = b""
        async with client, client.stream("GET", self._url) as response:
            response.raise_for_status()
            async for part in response.aiter_raw():  # A few compressed bytes can decompress to gigabytes.
                document += part
                if len(document) > _LARGEST_DOCUMENT:
                    raise jwt.PyJWKSetError("too large")
        return document


def _read_jwk_set(document: bytes) -> dict[str, SigningKey]:
    """Return the usable signing keys of a JWK set by id. Raises an error if no key is usable."""
    entries = msgspec.json.decode(document)["keys"]
    usable = {entry["kid"]: key for entry in entries if (key := _read_jwk(entry))}
    if not usable:
        raise jwt.PyJWKSetError("no usable key")
    return usable


def _read_jwk(entry: dict[str, Any]) -> SigningKey | None:
    """Return the key of one entry, or None if tokens cannot be verified with it."""
    key_id, algorithm = entry.get("kid"), entry.get("alg") or None
    is_for_signatures = entry.get("use") in (None, "sig") and algorithm in (None, *ALGORITHMS)
    is_public = "d" not in entry  # Anybody can sign with a key whose private half is published.
    if not isinstance(key_id, str) or not is_for_signatures or not is_public:
        return None
    try:
        jwk = jwt.PyJWK(entry, "EdDSA" if algorithm == _ED_25519 else algorithm)
    except Exception as error:  # noqa: BLE001 - PyJWT and cryptography raise many kinds of errors here
        _log.warning("signing_key_not_usable", key_id=key_id[:100], error=type(error).__name__)
        return None
    if jwk.algorithm_name not in ALGORITHMS:
        return None
    presumed = _OF_TYPE.get(jwk.algorithm_name, (jwk.algorithm_name,))
    return SigningKey(jwk.key, (algorithm,) if algorithm else presumed)
