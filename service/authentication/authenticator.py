"""Verifies bearer tokens: OAuth 2.0 access tokens (RFC 6750, RFC 9068) and API keys."""

import re
import time
from typing import Any

import jwt
import msgspec
from cachetools import TLRUCache

from service.authentication import api_keys
from service.authentication.api_keys import looks_like_api_key
from service.authentication.signing_keys import ALGORITHMS, SigningKeys
from service.calculation_requests.request_secrets import looks_like_secret
from service.postgres import connections
from service.postgres.pool import Pool
from service.settings import ServiceSettings

READ = "request:read"
WRITE = "request:write"
READ_ALL = "request:read-all"  # lets internal readers read any firm's requests, by uuid

_LARGEST_TOKEN = 8 * 1024
_NOT_VALID = "The access token is not valid: it is no JWT, or its signature or a claim is missing or wrong."
_REASONS: dict[type[Exception], str] = {
    jwt.ExpiredSignatureError: "The access token has expired: request a new one.",
    jwt.InvalidAudienceError: "The access token is for another audience: request one for this service.",
    jwt.InvalidIssuerError: "The access token is from another issuer than the one that the service trusts.",
}
# RFC 9068, section 4. Other tokens of the issuer, such as ID tokens, are not accepted.
_ACCESS_TOKEN_TYPES = frozenset({"at+jwt", "application/at+jwt"})
_NOT_STORABLE = re.compile("[\0\ud800-\udfff]")  # NUL and lone surrogates, which Postgres rejects in a text
_MOST_CACHED = 10_000  # tokens: about 20 MB
_LONGEST_CACHED_SECONDS = 300.0  # the longest that a token is trusted after its key was dropped


class Caller(msgspec.Struct, frozen=True):
    """The conveyancer whose system is calling, and what the access token allows."""

    conveyancer_id: str
    scopes: frozenset[str]
    expires_at: float  # seconds since the epoch


class InternalReader(msgspec.Struct, frozen=True):
    """One of our own services, which reads the requests of any firm, and their events, by uuid."""

    client_id: str
    expires_at: float


class InvalidCredentials(Exception):
    """The access token or API key is not accepted; the message says why."""


class InsufficientScope(Exception):
    """The access token lacks the scope that the endpoint needs, or belongs to an internal reader."""

    def __init__(self, scope: str, *, is_internal: bool = False) -> None:
        super().__init__(
            f"The scope {READ_ALL} makes this client an internal reader, which can neither create nor list "
            f"requests: request a token with {scope} instead."
            if is_internal
            else f"The access token lacks the scope {scope}: request one that has it."
        )
        self.scope = scope


class Authenticator:
    """Verifies the credentials of callers, and caches the access tokens that it has verified."""

    def __init__(self, settings: ServiceSettings, signing_keys: SigningKeys, pool: Pool) -> None:
        self._settings = settings
        self._internal_clients = {each.strip() for each in settings.auth_internal_clients.split(",")} - {""}
        self._signing_keys = signing_keys
        self._pool = pool
        self._verified: TLRUCache[str, Caller | InternalReader] = TLRUCache(
            maxsize=_MOST_CACHED, ttu=_cached_until, timer=time.time
        )

    async def verify_access_token(self, token: str, *, scope: str) -> Caller:
        """Return the caller. Raises InvalidCredentials, InsufficientScope or SigningKeysUnavailable."""
        caller = await self._verify(token)
        if isinstance(caller, InternalReader) or scope not in caller.scopes:
            raise InsufficientScope(scope, is_internal=isinstance(caller, InternalReader))
        return caller

    async def verify_reader(self, token: str) -> Caller | InternalReader:
        """Return a caller with the scope READ, or an internal reader. Raises like `verify_access_token`."""
        caller = await self._verify(token)
        if isinstance(caller, Caller) and READ not in caller.scopes:
            raise InsufficientScope(READ)
        return caller

    async def verify_api_key_or_token(self, token: str) -> None:
        """Accept any valid API key or access token.

        Raises as `verify_access_token` does, and PostgresUnavailable, because API keys are in Postgres.
        """
        if not looks_like_api_key(token):
            await self._verify(token)
            return
        seconds = self._settings.database_timeout_seconds
        async with connections.Acquired(self._pool, seconds=seconds) as connection:
            is_valid = await api_keys.is_valid(connection, token)
        if not is_valid:
            raise InvalidCredentials(
                "The API key is not valid: it was revoked or never issued, or its firm is disabled."
            )

    async def _verify(self, token: str) -> Caller | InternalReader:
        if caller := self._verified.get(token):
            return caller
        caller = await self._decode(token)
        self._verified[token] = caller
        return caller

    async def _decode(self, token: str) -> Caller | InternalReader:
        if looks_like_api_key(token):
            raise InvalidCredentials("This endpoint takes no API key: send an access token.")
        if looks_like_secret(token):
            raise InvalidCredentials(
                "This endpoint takes no request's secret, which opens only GET /v1/request/{uuid}: send an "
                "access token."
            )
        if len(token) > _LARGEST_TOKEN:
            raise InvalidCredentials(
                f"The access token has {len(token)} characters: at most {_LARGEST_TOKEN} are accepted."
            )
        try:
            header = jwt.get_unverified_header(token)
            _check_header(header)
            signing_key = await self._signing_keys.find(header["kid"])
            if signing_key is None:
                raise InvalidCredentials(_NOT_VALID)
            claims = jwt.decode(
                token,
                signing_key.public_key,
                algorithms=signing_key.algorithms,
                issuer=self._settings.auth_issuer,
                audience=self._settings.auth_audience,
                leeway=self._settings.auth_leeway_seconds,
                options={"require": ["exp", "iss", "aud"]},
            )
            return self._caller(claims)
        except (jwt.PyJWTError, ValueError, OverflowError) as error:
            raise InvalidCredentials(_REASONS.get(type(error), _NOT_VALID)) from None

    def _caller(self, claims: dict[str, Any]) -> Caller | InternalReader:
        scope = claims.get("scope", "")
        if not isinstance(scope, str):  # RFC 9068, section 2.2.3
            raise InvalidCredentials(
                "The access token's scope is not one string, with spaces between scopes."
            )
        scopes = frozenset(scope.split())
        expires_at = claims["exp"]
        if not isinstance(expires_at, int | float):  # PyJWT also accepts the text "1700000000".
            raise InvalidCredentials(_NOT_VALID)
        expires_at += self._settings.auth_leeway_seconds
        client_id = claims.get("client_id")
        if READ_ALL in scopes and isinstance(client_id, str) and client_id in self._internal_clients:
            return InternalReader(client_id, expires_at)
        conveyancer_id = claims.get(self._settings.auth_tenant_claim)
        if not isinstance(conveyancer_id, str) or _NOT_STORABLE.search(conveyancer_id):
            raise InvalidCredentials("The access token names no client: its claim for that is missing.")
        return Caller(conveyancer_id, scopes, expires_at)


def _check_header(header: dict[str, Any]) -> None:
    """Reject tokens that cannot be access tokens of the issuer, before any cryptography."""
    if header.get("alg") not in ALGORITHMS:
        raise InvalidCredentials("The access token is signed with an algorithm that is not accepted.")
    if str(header.get("typ", "")).lower() not in _ACCESS_TOKEN_TYPES:
        raise InvalidCredentials("The token is not an access token: its typ must be at+jwt.")
    if "crit" in header or not isinstance(header.get("kid"), str):
        raise InvalidCredentials("The access token has a header that is not accepted.")


def is_jwt(token: str) -> bool:
    """Whether *token* has the three parts of a signed JWT, as every access token has (RFC 7515)."""
    return token.count(".") == 2


def _cached_until(_token: str, caller: Caller | InternalReader, now: float) -> float:
    return min(caller.expires_at, now + _LONGEST_CACHED_SECONDS)
