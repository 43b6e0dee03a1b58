"""The issuer's signing keys: its JWK set (RFC 7517), cached and refreshed."""

import asyncio
import ssl
import time
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import jwt
import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
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
_MOST = 20  # different keys with one id, each of which may be tried with a token; and unused keys in the log
_RSA_BITS = range(2048, 8192 + 1)  # RFC 7518, section 3.3. Longer ones would take longer than any curve.
OTHER_USE = "its use or key_ops is not for signatures"

_log = structlog.get_logger()

with suppress(ValueError):  # PyJWT 2.15 lacks it. A release that has it raises ValueError.
    jwt.register_algorithm(_ED_25519, OKPAlgorithm())


class SigningKeysUnavailable(Exception):
    """The access token cannot be verified now: keep it, and try again after the time in Retry-After."""


class SigningKey(msgspec.Struct, frozen=True):
    """A public key of the issuer, and the algorithms accepted with it, all of which suit the key's type."""

    public_key: AllowedPublicKeys
    algorithms: tuple[str, ...]


class SigningKeys:
    """The issuer's public keys by key id. While the issuer is down, the last fetched keys stay in use."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tls = ssl.create_default_context()
        self.unused: dict[str, str] = {}  # the first keys of the last document that are not used, and why
        self._document = b""  # that the keys are from
        self._by_id: dict[str, list[SigningKey]] = {}
        self._failure: Exception | None = jwt.PyJWKSetError("not fetched yet")  # of the last fetch
        self._fetching: asyncio.Task[None] | None = None
        self._last_attempt = float("-inf")
        self._fetched_at = float("-inf")  # when the last fetch that succeeded began
        api_metrics.jwks_age.set_function(lambda: time.monotonic() - self._fetched_at)

    def find(self, key_id: str) -> list[SigningKey] | None:
        """Return the keys with this id, or None if the issuer has none. Raises SigningKeysUnavailable.

        An unknown id may belong to a new key, so it starts a fetch, at most one each second. No caller waits
        for the fetch: anybody can make up ids, and waiting callers would hold all connections.
        """
        keys = self._by_id.get(key_id)
        if keys is None:
            now = time.monotonic()
            if now - self._last_attempt >= _INTERVAL_SECONDS:
                self._fetch()
            if now - self._fetched_at >= _FRESH_SECONDS:
                # None would become a 401, and callers would discard a token that may be valid.
                raise SigningKeysUnavailable from self._failure
        return keys

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
        """Return the running fetch, or start one. Concurrent callers share it, so it logs no caller's ids."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._replace(), context=Context())
        return self._fetching

    async def _replace(self) -> None:
        try:
            self._last_attempt = began = time.monotonic()
            async with asyncio.timeout(_FETCH_SECONDS):
                document = await connect_to_any(self._download, seconds=_FETCH_SECONDS)
            if document != self._document:
                self.unused = {}
                self._by_id = await asyncio.to_thread(_read_keys, document, self.unused)
            self._document, self._fetched_at, self._failure = document, began, None
        except Exception as error:  # noqa: BLE001 - whatever the failure, the cached keys stay in use
            self._failure = error
            _log.warning("signing_keys_not_fetched", error=type(error).__name__, keys_kept=len(self._by_id))
        finally:
            self._fetching = None

    async def _download(self) -> bytes:
        """Return the document. Redirects are not followed: over plain HTTP anyone could replace the keys."""
        address = urlsplit(self._url)
        if address.scheme == "file":
            return await asyncio.to_thread(Path(unquote(address.path)).read_bytes)
        client = httpx.AsyncClient(verify=self._tls, headers={"Accept-Encoding": "identity"})
        document = bytearray()
        async with client, client.stream("GET", self._url) as response:
            response.raise_for_status()
            async for part in response.aiter_raw():  # A few compressed bytes can decompress to gigabytes.
                document += part
                if len(document) > _LARGEST_DOCUMENT:
                    raise jwt.PyJWKSetError("too large")
        return bytes(document)


def _read_keys(document: bytes, unused: dict[str, str]) -> dict[str, list[SigningKey]]:
    """Return the usable keys by id, and add the others to *unused*. Raises an error if no key is usable."""
    by_id: dict[str, list[SigningKey]] = {}
    members = msgspec.json.decode(document.removeprefix(b"\xef\xbb\xbf"), type=dict[str, msgspec.Raw])
    # Each entry is decoded by itself, so that a broken one does not affect the others.
    for encoded in msgspec.json.decode(members["keys"], type=list[msgspec.Raw]):
        key_id = "(no kid)"
        try:
            entry = msgspec.json.decode(encoded, type=dict[str, Any])
            key_id = msgspec.convert(entry.get("kid"), str)
            key, others = _read_jwk(entry), by_id.get(key_id, [])
            by_id[key_id] = others if key in others else [*others, key][:_MOST]
        except Exception as error:  # noqa: BLE001 - PyJWT and cryptography raise many kinds of errors here
            if len(unused) < _MOST:
                unused[key_id[:100]] = str(error)[:100] or type(error).__name__
    if unused:
        _log.warning("signing_keys_not_used", keys=unused)
    if not by_id:
        raise jwt.PyJWKSetError("no usable key")
    return by_id


def _read_jwk(entry: dict[str, Any]) -> SigningKey:
    """Return the key of one entry. Raises an error if tokens cannot, or must not, be verified with it."""
    entry = {name: value for name, value in entry.items() if value is not None}
    algorithm = entry.get("alg") or None
    operations = msgspec.convert(entry.get("key_ops", ["verify"]), list[str])
    if entry.get("use") not in (None, "sig") or "verify" not in operations:
        raise jwt.PyJWKError(OTHER_USE)
    # Anybody can sign with a key if its private half, or a part of that, is published.
    if not entry.keys().isdisjoint(("d", "p", "q", "dp", "dq", "qi", "oth", "k")):
        raise jwt.PyJWKError("it is not public")
    jwk = jwt.PyJWK(entry, "EdDSA" if algorithm == _ED_25519 == entry.get("crv") else algorithm)
    algorithms = (algorithm,) if algorithm else _OF_TYPE.get(jwk.algorithm_name, (jwk.algorithm_name,))
    key = jwk.Algorithm.prepare_key(jwk.key)  # Raises an error if `alg` is for another curve.
    if not {*algorithms} <= {*ALGORITHMS}:
        raise jwt.PyJWKError("its algorithm is not accepted")
    if isinstance(key, RSAPublicKey) and (key.key_size not in _RSA_BITS or key.public_numbers().e >= 2**32):
        raise jwt.PyJWKError(f"RSA with {key.key_size} bits, or too large an exponent")
    return SigningKey(key, algorithms)
