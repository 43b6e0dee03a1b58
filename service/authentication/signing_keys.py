"""The keys that access tokens are signed with: the issuer's JWKS, cached and kept fresh (RFC 7517)."""

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
from jwt.algorithms import AllowedPublicKeys

from service.settings import ServiceSettings
from service.telemetry import api_metrics

_RSA_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ALGORITHMS = (*_RSA_ALGORITHMS, "ES256", "ES384", "ES512", "EdDSA")
_LARGEST_DOCUMENT = 1024 * 1024
_MOST_REDIRECTS = 3
_PATIENCE_SECONDS = 1.0  # how long a caller waits for a key that we have not: as long as for Postgres

_log = structlog.get_logger()


class SigningKeysUnavailable(Exception):
    """The issuer's keys cannot be had just now, so nobody can tell whether the token is good."""


class UnknownSigningKey(Exception):
    """The token was signed with a key that the issuer does not publish."""


class UnusableDocument(Exception):
    """What the issuer sent is no JWK set, too large, or came over plain HTTP."""


class KeySet(msgspec.Struct):
    """A JWK set (RFC 7517, section 5)."""

    keys: list[dict[str, Any]]


class SigningKey(msgspec.Struct, frozen=True):
    """A public key of the issuer, and the algorithms that it may verify: of its own type only."""

    key_id: str
    key: AllowedPublicKeys
    algorithms: tuple[str, ...]


class SigningKeys:
    """The issuer's public keys by key id. Those once fetched are used for as long as the issuer is down."""

    def __init__(
        self, url: str, *, refresh_seconds: float, timeout_seconds: float, cooldown_seconds: float
    ) -> None:
        self._url = url
        self._refresh_seconds = refresh_seconds
        self._timeout_seconds = timeout_seconds
        self._cooldown_seconds = cooldown_seconds
        self._trusted = ssl.create_default_context()
        self._keys: dict[str, SigningKey] = {}
        self._is_current = False  # whether the last fetch succeeded
        self._fetching: asyncio.Task[None] | None = None
        self._last_attempt = float("-inf")
        self._failure: Exception | None = None  # of the last fetch

    async def find(self, key_id: str) -> SigningKey:
        """Return a key. Raises UnknownSigningKey or SigningKeysUnavailable.

        An unknown key id may be that of a new key, so it causes a fetch; but one in a while, or anybody could
        have us ask the issuer at will.
        """
        if key_id not in self._keys and self._may_ask():
            await asyncio.wait([self._fetch()], timeout=_PATIENCE_SECONDS)
        if key_id in self._keys:
            return self._keys[key_id]
        if self._is_current and not self._is_fetching:
            raise UnknownSigningKey
        raise SigningKeysUnavailable from self._failure

    async def refresh(self) -> None:
        """Fetch the keys, however long the issuer takes. Raises SigningKeysUnavailable when that fails."""
        await asyncio.wait([self._fetch()])
        if not self._is_current:
            raise SigningKeysUnavailable from self._failure

    async def run(self) -> None:
        """Fetch the keys now, and again and again until cancelled."""
        try:
            while True:
                with suppress(SigningKeysUnavailable):  # It is in the log.
                    await self.refresh()
                await asyncio.sleep(self._refresh_seconds if self._is_current else self._cooldown_seconds)
        finally:
            if self._fetching is not None:
                self._fetching.cancel()

    @property
    def _is_fetching(self) -> bool:
        return self._fetching is not None and not self._fetching.done()

    def _may_ask(self) -> bool:
        return self._is_fetching or time.monotonic() - self._last_attempt >= self._cooldown_seconds

    def _fetch(self) -> asyncio.Task[None]:
        """Begin a fetch unless one is under way: there is one at a time, however many wait for it."""
        if self._fetching is None or self._fetching.done():
            self._last_attempt = time.monotonic()
            self._fetching = asyncio.create_task(self._replace_keys())
        return self._fetching

    async def _replace_keys(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                document = await self._download()
            self._keys = _read_key_set(document)
        except Exception as error:  # noqa: BLE001 - whatever a fetch ends with, the keys we have are used
            self._is_current = False
            self._failure = error
            api_metrics.jwks_not_refreshed.inc()
            _log.warning("signing_keys_not_fetched", error=type(error).__name__, keys_kept=len(self._keys))
        else:
            self._is_current = True
            api_metrics.note_keys_fetched()
            _log.debug("signing_keys_fetched", keys=len(self._keys))

    async def _download(self) -> bytes:
        """Return the document at an https or file URL; settings admit no other scheme."""
        address = urlsplit(self._url)
        if address.scheme == "file":
            return await asyncio.to_thread(Path(unquote(address.path)).read_bytes)
        client = httpx.AsyncClient(
            verify=self._trusted,
            timeout=self._timeout_seconds,
            follow_redirects=True,
            max_redirects=_MOST_REDIRECTS,
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
            event_hooks={"request": [_refuse_plain_http]},
        )
        document = b""
        async with client, client.stream("GET", self._url) as response:
            response.raise_for_status()
            async for part in response.aiter_raw():
                document += part
                if len(document) > _LARGEST_DOCUMENT:
                    raise UnusableDocument
        return document


def open_signing_keys(settings: ServiceSettings) -> SigningKeys:
    """Return the issuer's keys as the settings locate them."""
    return SigningKeys(
        settings.auth_jwks_url,
        refresh_seconds=settings.auth_jwks_refresh_seconds,
        timeout_seconds=settings.auth_jwks_timeout_seconds,
        cooldown_seconds=settings.auth_jwks_cooldown_seconds,
    )


async def _refuse_plain_http(request: httpx.Request) -> None:
    """Go nowhere, redirects included, where anybody on the way could put in keys of their own."""
    if request.url.scheme != "https":
        raise UnusableDocument


def _read_key_set(document: bytes) -> dict[str, SigningKey]:
    """Return the usable signing keys of a JWK set. Raises UnusableDocument when there is none."""
    try:
        entries = msgspec.json.decode(document, type=KeySet).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UnusableDocument from None
    keys = {key.key_id: key for entry in entries if (key := _read_key(entry)) is not None}
    if not keys:
        raise UnusableDocument
    return keys


def _read_key(entry: dict[str, Any]) -> SigningKey | None:
    """Return a key that tokens may be signed with; None for any other, which takes nothing from the rest."""
    key_id = entry.get("kid")
    is_to_verify = entry.get("use") in (None, "sig") and entry.get("alg") in (None, "", *ALGORITHMS)
    is_public = "d" not in entry  # With the private half published anybody can sign.
    if not isinstance(key_id, str) or not is_to_verify or not is_public:
        return None
    try:
        jwk = jwt.PyJWK.from_dict(entry)
    except Exception as error:  # noqa: BLE001 - odd members raise errors of every kind in PyJWT and cryptography
        _log.warning("signing_key_not_usable", key_id=key_id[:100], error=type(error).__name__)
        return None
    if jwk.algorithm_name not in ALGORITHMS:
        return None
    # Without `alg` PyJWT takes an RSA key for one of RS256; other types have one algorithm for each curve.
    any_of_rsa = jwk.key_type == "RSA" and not entry.get("alg")
    return SigningKey(key_id, jwk.key, _RSA_ALGORITHMS if any_of_rsa else (jwk.algorithm_name,))
