"""From the Authorization header to a caller: OAuth 2.0 access tokens (RFC 6750, RFC 9068) and API keys."""

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import jwt
import msgspec
from cachetools import TLRUCache
from litestar import Request

from service.authentication import api_keys
from service.authentication.api_keys import ApiKeyUses
from service.authentication.signing_keys import ALGORITHMS, SigningKeys, UnknownSigningKey
from service.postgres import loans
from service.postgres.pool import Pool
from service.settings import ServiceSettings
from service.telemetry import api_metrics

AnyRequest: TypeAlias = Request[Any, Any, Any]

READ = "request:read"
WRITE = "request:write"

_LARGEST_TOKEN = 8 * 1024
_TOKEN_TYPES = frozenset({"at+jwt", "application/at+jwt"})  # RFC 9068, section 4
_NOT_STORABLE = re.compile("[\0\ud800-\udfff]")  # in a text, by Postgres: NUL, and lone surrogates
_LONGEST_MEMORY_SECONDS = 300.0  # a token signed with a withdrawn key is trusted no longer than this


class Caller(msgspec.Struct, frozen=True):
    """Who is calling: a conveyancer's system, and what its token lets it do."""

    conveyancer_id: str
    scopes: frozenset[str]
    expires_at: float  # seconds since the epoch


class Unauthenticated(Exception):
    """There is no valid token."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason  # None when no credentials were sent: RFC 6750 then wants no error code


class RepeatedCredentials(Exception):
    """There is more than one Authorization header: send one token."""


class InsufficientScope(Exception):
    """The token does not carry the scope that this endpoint needs."""

    def __init__(self, scope: str) -> None:
        super().__init__(scope)
        self.scope = scope


class Authenticator:
    """Verifies what stands in an Authorization header, and remembers access tokens it has verified.

    Callers of what needs Postgres are turned away before that while too many wait for it, or it is away: to
    refuse them once their token and body have been read costs nearly as much as to serve.
    """

    def __init__(
        self, settings: ServiceSettings, keys: SigningKeys, pool: Pool, api_key_uses: ApiKeyUses
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._pool = pool
        self._api_key_uses = api_key_uses
        self._verified: TLRUCache[str, Caller] = TLRUCache(
            maxsize=settings.auth_remembered_tokens, ttu=_forget_at, timer=time.time
        )

    async def access_token(self, authorization: Sequence[str], *, scope: str) -> Caller:
        """Return the caller behind an access token that carries *scope*.

        Raises PostgresUnavailable, Unauthenticated, RepeatedCredentials, InsufficientScope or
        SigningKeysUnavailable.
        """
        self._pool.check_not_full()
        self._pool.check_reachable()
        token = _bearer_token(authorization)
        if api_keys.looks_like_one(token):
            raise Unauthenticated("An API key does not open this endpoint: send an access token")
        caller = await self._verify(token)
        if scope not in caller.scopes:
            raise InsufficientScope(scope)
        return caller

    async def api_key_or_token(self, authorization: Sequence[str]) -> None:
        """Let any valid API key or access token pass. Raises as `access_token` does.

        Only a key is looked up in Postgres, whose queue then turns callers away.
        """
        token = _bearer_token(authorization)
        if not api_keys.looks_like_one(token):
            await self._verify(token)
            return
        seconds = self._settings.database_timeout_seconds
        async with loans.connection(self._pool, seconds=seconds) as connection:
            prefix = await api_keys.find(connection, token)
        if prefix is None:
            raise Unauthenticated("The API key is not valid")
        self._api_key_uses.note(prefix)

    async def _verify(self, token: str) -> Caller:
        if caller := self._verified.get(token):
            api_metrics.token_hits.inc()
            return caller
        api_metrics.token_misses.inc()
        caller = await self._decode(token)
        self._verified[token] = caller
        return caller

    async def _decode(self, token: str) -> Caller:
        if len(token) > _LARGEST_TOKEN:
            raise Unauthenticated("The access token is too large")
        try:
            header = jwt.get_unverified_header(token)
            _check_header(header)
            key = await self._keys.find(header["kid"])
            claims = jwt.decode(
                token,
                key.key,
                algorithms=key.algorithms,
                issuer=self._settings.auth_issuer,
                audience=self._settings.auth_audience,
                leeway=self._settings.auth_leeway_seconds,
                options={"require": ["exp", "iss", "aud"]},
            )
            return self._caller(claims)
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("The access token expired") from None
        except jwt.InvalidAudienceError:
            raise Unauthenticated("The access token is for another audience") from None
        except jwt.InvalidIssuerError:
            raise Unauthenticated("The access token is of another issuer") from None
        except (jwt.PyJWTError, UnknownSigningKey, ValueError, OverflowError):
            raise Unauthenticated("The access token is not valid") from None

    def _caller(self, claims: dict[str, Any]) -> Caller:
        conveyancer_id = claims.get(self._settings.auth_tenant_claim)
        if not isinstance(conveyancer_id, str) or _NOT_STORABLE.search(conveyancer_id):
            raise Unauthenticated("The access token names no client")
        scope = claims.get("scope", "")
        if not isinstance(scope, str):  # RFC 9068, section 2.2.3
            raise Unauthenticated("The access token's scope is not one string with spaces in it")
        expires_at = claims["exp"]
        if not isinstance(expires_at, int | float):  # PyJWT takes "1700000000", too.
            raise Unauthenticated("The access token is not valid")
        leeway_seconds = self._settings.auth_leeway_seconds
        return Caller(conveyancer_id, frozenset(scope.split()), expires_at + leeway_seconds)


def requires(scope: str) -> Callable[[AnyRequest], Awaitable[None]]:
    """Return the `before_request` of an endpoint that takes an access token with *scope*.

    A guard would say the same, but for every guard Litestar copies the handler anew at each request.
    """

    async def authenticate(request: AnyRequest) -> None:
        authenticator: Authenticator = request.app.state.authenticator
        request.scope["user"] = await authenticator.access_token(
            request.headers.getall("authorization", []), scope=scope
        )

    return authenticate


async def requires_api_key_or_token(request: AnyRequest) -> None:
    """Let in callers with an API key or any valid access token: another `before_request`."""
    authenticator: Authenticator = request.app.state.authenticator
    await authenticator.api_key_or_token(request.headers.getall("authorization", []))


def _bearer_token(authorization: Sequence[str]) -> str:
    """Return the token. A second header is refused (RFC 6750, section 3.1): others may go by that one."""
    if len(authorization) > 1:
        raise RepeatedCredentials
    scheme, _, token = authorization[0].partition(" ") if authorization else ("", "", "")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated
    return token.strip()


def _check_header(header: dict[str, Any]) -> None:
    """Refuse, before any cryptography, what cannot be one of the issuer's access tokens."""
    if header.get("alg") not in ALGORITHMS:
        raise Unauthenticated("The access token is signed with an algorithm that is not accepted")
    if str(header.get("typ", "")).lower() not in _TOKEN_TYPES:
        raise Unauthenticated("The token is not an access token: its typ must be at+jwt")
    if "crit" in header or not isinstance(header.get("kid"), str):
        raise Unauthenticated("The access token has a header that is not accepted")


def _forget_at(_token: str, caller: Caller, now: float) -> float:
    return min(caller.expires_at, now + _LONGEST_MEMORY_SECONDS)
