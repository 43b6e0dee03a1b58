"""The issuer's signing keys: its JWK set (RFC 7517), cached and refreshed."""

import asyncio
import ssl
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import jwt
import msgspec
import structlog
from jwt.algorithms import AllowedPublicKeys

from service import json_faults
from service.settings import ServiceSettings
from service.telemetry import api_metrics

_RSA_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ALGORITHMS = (*_RSA_ALGORITHMS, "ES256", "ES384", "ES512", "EdDSA")
_LARGEST_DOCUMENT = 1024 * 1024
_MOST_REDIRECTS = 3

_log = structlog.get_logger()


class SigningKeysUnavailable(Exception):
    """The issuer's keys cannot be fetched now, so the token can be neither accepted nor refused."""


class UnknownSigningKey(Exception):
    """The token is signed with a key that the issuer does not publish."""


class UnusableDocument(Exception):
    """The issuer's document is not a JWK set, has no usable key, is too large, or came over plain HTTP."""


class JwkSet(msgspec.Struct):
    """A JWK set (RFC 7517, section 5)."""

    keys: list[dict[str, Any]]


class SigningKey(msgspec.Struct, frozen=True):
    """A public key of the issuer, and the algorithms it may verify. They all suit the type of the key."""

    key_id: str
    public_key: AllowedPublicKeys
    algorithms: tuple[str, ...]


class SigningKeys:
    """The issuer's public keys by key id. While the issuer is down, the last ones fetched stay in use.

    A caller waits *caller_wait_seconds* for a key that is not cached; as long as for Postgres by default.
    """

    def __init__(
        self,
        url: str,
        *,
        refresh_seconds: float,
        timeout_seconds: float,
        cooldown_seconds: float,
        caller_wait_seconds: float = 1.0,
    ) -> None:
        self._url = url
        self._refresh_seconds = refresh_seconds
        self._timeout_seconds = timeout_seconds
        self._cooldown_seconds = cooldown_seconds
        self._caller_wait_seconds = caller_wait_seconds
        self._by_id: dict[str, SigningKey] = {}
        self._is_current = False  # whether the last fetch succeeded
        self._fetching: asyncio.Task[None] | None = None
        self._last_attempt = float("-inf")
        self._failure: Exception | None = None  # of the last fetch

    async def find(self, key_id: str) -> SigningKey:
        """Return the key with this id. Raises UnknownSigningKey or SigningKeysUnavailable.

        An unknown id may belong to a new key, so it causes a fetch: at most one per cooldown, because
        anybody can send tokens with made-up ids.
        """
        if key_id not in self._by_id and self._may_fetch():
            await asyncio.wait([self._fetch()], timeout=self._caller_wait_seconds)
        if key_id in self._by_id:
            return self._by_id[key_id]
        if self._is_current and not self._is_fetching:
            raise UnknownSigningKey
        # Not UnknownSigningKey, which is a 401: it makes callers discard a token that may be valid.
        raise SigningKeysUnavailable from self._failure

    async def refresh(self) -> None:
        """Fetch the keys and wait for the end of the fetch. Raises SigningKeysUnavailable if it fails."""
        await asyncio.wait([self._fetch()])
        if not self._is_current:
            raise SigningKeysUnavailable from self._failure

    async def run(self) -> None:
        """Fetch the keys now, and then at intervals until cancelled."""
        try:
            while True:
                with suppress(SigningKeysUnavailable):  # The failure was logged.
                    await self.refresh()
                await asyncio.sleep(self._refresh_seconds if self._is_current else self._cooldown_seconds)
        finally:
            if self._fetching is not None:
                self._fetching.cancel()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The authorities that this machine trusts, loaded once: that takes 20 ms and more."""
        return ssl.create_default_context()

    @property
    def _is_fetching(self) -> bool:
        return self._fetching is not None and not self._fetching.done()

    def _may_fetch(self) -> bool:
        return self._is_fetching or time.monotonic() - self._last_attempt >= self._cooldown_seconds

    def _fetch(self) -> asyncio.Task[None]:
        """Return the running fetch, or start one: concurrent callers share it."""
        if self._fetching is None or self._fetching.done():
            self._last_attempt = time.monotonic()
            self._fetching = asyncio.create_task(self._replace())
        return self._fetching

    async def _replace(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                document = await self._download()
            self._by_id = _read_jwk_set(document)
        except Exception as error:  # noqa: BLE001 - whatever the failure, the cached keys stay in use
            self._is_current = False
            self._failure = error
            api_metrics.jwks_not_refreshed.inc()
            _log.warning("signing_keys_not_fetched", error=type(error).__name__, keys_kept=len(self._by_id))
        else:
            self._is_current = True
            api_metrics.note_keys_fetched()
            _log.debug("signing_keys_fetched", keys=len(self._by_id))

    async def _download(self) -> bytes:
        """Return the document at an https or file URL. The settings allow no other scheme.

        With httpx, because a thread with the standard library's client cannot be stopped while an issuer
        sends one byte at a time. Litestar depends on httpx anyway.
        """
        address = urlsplit(self._url)
        if address.scheme == "file":
            return await asyncio.to_thread(Path(unquote(address.path)).read_bytes)
        client = httpx.AsyncClient(
            verify=self._tls,
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
    """Refuse plain HTTP, in redirects too: anybody on the network could replace the keys."""
    if request.url.scheme != "https":
        raise UnusableDocument


def _read_jwk_set(document: bytes) -> dict[str, SigningKey]:
    """Return the usable signing keys of a JWK set by id. Raises UnusableDocument if there is none."""
    try:
        entries = msgspec.json.decode(document, type=JwkSet).keys
    except json_faults.UNREADABLE:
        raise UnusableDocument from None
    usable = [key for entry in entries if (key := _read_jwk(entry)) is not None]
    if not usable:
        raise UnusableDocument
    return {key.key_id: key for key in usable}


def _read_jwk(entry: dict[str, Any]) -> SigningKey | None:
    """Return the key of one entry, or None if tokens cannot be verified with it."""
    key_id = entry.get("kid")
    is_for_signatures = entry.get("use") in (None, "sig") and entry.get("alg") in (None, "", *ALGORITHMS)
    is_public = "d" not in entry  # Anybody can sign with a key whose private half is published.
    if not isinstance(key_id, str) or not is_for_signatures or not is_public:
        return None
    try:
        jwk = jwt.PyJWK.from_dict(entry)
    except Exception as error:  # noqa: BLE001 - PyJWT and cryptography raise errors of all kinds on odd members
        _log.warning("signing_key_not_usable", key_id=key_id[:100], error=type(error).__name__)
        return None
    if jwk.algorithm_name not in ALGORITHMS:
        return None
    # For an RSA key without `alg` PyJWT assumes RS256. Keys of other types have one algorithm per curve.
    takes_any_rsa = jwk.key_type == "RSA" and not entry.get("alg")
    return SigningKey(key_id, jwk.key, _RSA_ALGORITHMS if takes_any_rsa else (jwk.algorithm_name,))
