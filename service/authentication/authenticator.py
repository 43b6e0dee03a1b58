"""Verifies the credentials of callers: access tokens, and API keys (RFC 6750)."""

import time
from operator import attrgetter

from cachetools import TLRUCache, cachedmethod

from service.authentication import access_tokens, api_keys
from service.authentication.access_tokens import AccessTokens, Caller, InternalReader, InvalidCredentials
from service.authentication.signing_keys import SigningKeys
from service.postgres import connections
from service.postgres.pool import Pool
from service.settings import ServiceSettings

_MOST_CACHED = 10_000  # tokens: about 20 MB
_LONGEST_CACHED_SECONDS = 300.0  # the longest that a token is trusted after its key was dropped


class InsufficientScope(Exception):
    """The access token lacks the scope that the endpoint needs, or belongs to an internal reader."""

    def __init__(self, scope: str, message: str = "") -> None:
        super().__init__(message or f"The access token lacks the scope {scope}: request one that has it.")
        self.scope = scope


class Authenticator:
    """Verifies the credentials of callers, and caches the access tokens that it has verified."""

    def __init__(self, settings: ServiceSettings, signing_keys: SigningKeys, pool: Pool) -> None:
        self._settings = settings
        self._access_tokens = AccessTokens(settings, signing_keys)
        self._pool = pool
        self._verified: TLRUCache[object, Caller | InternalReader] = TLRUCache(
            maxsize=_MOST_CACHED,
            ttu=lambda _, caller, now: min(caller.expires_at, now + _LONGEST_CACHED_SECONDS),
            timer=time.time,
        )

    def verify_access_token(self, token: str, *, scope: str) -> Caller:
        """Return the caller. Raises InvalidCredentials, InsufficientScope or SigningKeysUnavailable."""
        caller = self._verify(token)
        prefix = self._settings.auth_scope_prefix
        if isinstance(caller, InternalReader):
            message = (
                f"The scope {prefix}{access_tokens.READ_ALL} makes this client an internal reader, which can "
                f"only read requests by uuid: request a token with {prefix}{scope} instead."
            )
            raise InsufficientScope(prefix + scope, message)
        if scope not in caller.scopes:
            raise InsufficientScope(prefix + scope)
        return caller

    def verify_reader(self, token: str) -> Caller | InternalReader:
        """Return a caller with the scope READ, or an internal reader. Raises like `verify_access_token`."""
        caller = self._verify(token)
        if isinstance(caller, InternalReader):
            return caller
        return self.verify_access_token(token, scope=access_tokens.READ)

    async def verify_api_key_or_token(self, token: str) -> None:
        """Accept any API key or access token. Raises as `verify_access_token`, and PostgresUnavailable."""
        if not api_keys.looks_like_api_key(token):
            self._verify(token)
            return
        seconds = self._settings.database_timeout_seconds
        async with connections.acquired(self._pool, seconds=seconds, party="") as connection:
            is_valid = await api_keys.is_valid(connection, token)
        if not is_valid:
            raise InvalidCredentials("The API key is not valid: it was revoked or never issued.")

    @cachedmethod(attrgetter("_verified"))
    def _verify(self, token: str) -> Caller | InternalReader:
        return self._access_tokens.verify(token)
