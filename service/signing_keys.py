"""The keys that access tokens are signed with: the issuer's JWKS, cached and kept fresh (RFC 7517)."""

import asyncio
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Any

import jwt
import msgspec
import structlog

from service import api_metrics
from service.settings import ServiceSettings

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
_LARGEST_DOCUMENT = 1024 * 1024
_FORCED_REFRESH_SECONDS = 10.0  # an unknown key id may cause no more than one fetch in this time

_log = structlog.get_logger()


class SigningKeysUnavailable(Exception):
    """The issuer's keys cannot be had, and none are known from before."""


class UnknownSigningKey(Exception):
    """The token was signed with a key that the issuer does not publish."""


class KeySet(msgspec.Struct):
    """A JWK set (RFC 7517, section 5)."""

    keys: list[dict[str, Any]]


class SigningKeys:
    """The issuer's public keys by key id. Those once fetched are used for as long as the issuer is down."""

    def __init__(self, url: str, *, refresh_seconds: float, timeout_seconds: float) -> None:
        self._url = url
        self._refresh_seconds = refresh_seconds
        self._timeout_seconds = timeout_seconds
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetching = asyncio.Lock()
        self._last_attempt = float("-inf")

    async def find(self, key_id: str) -> jwt.PyJWK:
        """Return a key. Raises UnknownSigningKey or SigningKeysUnavailable."""
        if key_id not in self._keys:
            await self._fetch_once()
        if key_id in self._keys:
            return self._keys[key_id]
        raise UnknownSigningKey if self._keys else SigningKeysUnavailable

    async def run(self) -> None:
        """Fetch the keys now, and again and again until cancelled."""
        while True:
            async with self._fetching:
                await self._fetch()
            await asyncio.sleep(self._refresh_seconds if self._keys else _FORCED_REFRESH_SECONDS)

    async def _fetch_once(self) -> None:
        """Fetch, unless another caller has just done so."""
        async with self._fetching:
            if time.monotonic() - self._last_attempt >= _FORCED_REFRESH_SECONDS:
                await self._fetch()

    async def _fetch(self) -> None:
        self._last_attempt = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                document = await asyncio.to_thread(_download, self._url, self._timeout_seconds)
            self._keys = _read_key_set(document)
        except (OSError, ValueError, HTTPException, jwt.PyJWTError) as error:
            api_metrics.jwks_not_refreshed.inc()
            _log.warning("signing_keys_not_fetched", error=type(error).__name__, keys_kept=len(self._keys))
        else:
            api_metrics.note_keys_fetched()
            _log.debug("signing_keys_fetched", keys=len(self._keys))


def open_signing_keys(settings: ServiceSettings) -> SigningKeys:
    """Return the issuer's keys as the settings locate them."""
    return SigningKeys(
        settings.auth_jwks_url,
        refresh_seconds=settings.auth_jwks_refresh_seconds,
        timeout_seconds=settings.auth_jwks_timeout_seconds,
    )


def _download(url: str, timeout_seconds: float) -> bytes:
    """Return the document at an https or file URL; settings admit no other scheme."""
    with urllib.request.urlopen(url, timeout=timeout_seconds) as response:  # noqa: S310 - see above
        document: bytes = response.read(_LARGEST_DOCUMENT)
    return document


def _read_key_set(document: bytes) -> dict[str, jwt.PyJWK]:
    """Return the usable signing keys of a JWK set. Raises ValueError when there is none."""
    entries = msgspec.json.decode(document, type=KeySet).keys
    keys = {}
    for entry in entries:
        with suppress(jwt.PyJWTError):  # A key of a kind we do not know takes nothing from the others.
            key = jwt.PyJWK.from_dict(entry)
            if key.key_id and key.public_key_use in (None, "sig") and key.algorithm_name in ALGORITHMS:
                keys[key.key_id] = key
    if not keys:
        raise ValueError("no usable key")
    return keys
