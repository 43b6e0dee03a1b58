"""Judges OAuth 2.0 access tokens: those of RFC 9068, and by settings those of providers that differ."""

import re
import time
from contextlib import suppress
from typing import Any

import jwt
import msgspec

from service.authentication.signing_keys import ALGORITHMS, SigningKeys
from service.settings import ServiceSettings

READ = "request:read"
WRITE = "request:write"
READ_ALL = "request:read-all"  # lets internal readers read any firm's requests, by uuid

_LARGEST_TOKEN = 8 * 1024
_NOT_VALID = "The access token is not valid: it is no JWT, or a claim is out of range."
_REASONS: dict[type[Exception], str] = {
    jwt.InvalidTokenError: "The access token is not valid: its header must have a kid, and no crit or b64.",
    jwt.ExpiredSignatureError: "The access token has expired: request a new one.",
    jwt.InvalidAudienceError: "The access token is for another audience: request one for this service.",
    jwt.InvalidIssuerError: "The access token is from another issuer than the one that the service trusts.",
}
# PyJWT's errors do not name a claim of the wrong type, and it accepts the text "1700000000" as a time.
_TYPES: dict[str, Any] = dict.fromkeys(("exp", "iat", "nbf"), int | float) | {"sub": str, "jti": str}
# The claims in which Keycloak and Cognito say what a token is, with the value in access tokens.
_KINDS = {"typ": "Bearer", "token_use": "access"}
_NOT_STORABLE = re.compile("[\0\ud800-\udfff]")  # NUL and lone surrogates, which Postgres rejects in a text


class Caller(msgspec.Struct, frozen=True):
    """The conveyancer whose system is calling, and what the access token allows."""

    conveyancer_id: str
    client_id: str  # the token's, for logs: another claim may name the conveyancer
    scopes: frozenset[str]  # those of this service, without AUTH_SCOPE_PREFIX
    expires_at: float  # seconds since the epoch


class InternalReader(msgspec.Struct, frozen=True):
    """One of our own services, which reads the requests of any firm, and their events, by uuid."""

    client_id: str
    expires_at: float


class InvalidCredentials(Exception):
    """The access token or API key is not accepted; the message says why."""


class AccessTokens:
    """Verifies access tokens with the issuer's keys, by the settings AUTH_….

    Where access tokens do not have the type at+jwt, ID tokens may have the same type. Four checks keep them
    out: the audience, which in ID tokens is a client; the claims in `_KINDS`; the claim of the client; and
    that every token must have a scope of this service.
    """

    def __init__(self, settings: ServiceSettings, signing_keys: SigningKeys) -> None:
        self._settings = settings
        self._signing_keys = signing_keys
        self._types = {_media_type(each) for each in _names(settings.auth_token_types)}
        # No other token of an issuer has the type at+jwt (RFC 9068, section 4).
        self._is_standard = self._types == {"at+jwt"} and settings.auth_audience is not None
        self._clients = _names(settings.auth_clients)
        self._internal_clients = _names(settings.auth_internal_clients)

    def verify(self, token: str) -> Caller | InternalReader:
        """Return the caller. Raises InvalidCredentials or SigningKeysUnavailable."""
        _check_form(token)
        issuer, audience = self._settings.auth_issuer, self._settings.auth_audience
        try:
            # The issuer is checked first, because other issuers' tokens differ in the rest, too.
            unverified = jwt.decode_complete(
                token, options={"verify_signature": False, "verify_iss": True}, issuer=issuer
            )
            self._check_header(unverified["header"])
            self._check_claims(unverified["payload"])
            signing_keys = self._signing_keys.find(unverified["header"]["kid"])
            if signing_keys is None:
                raise InvalidCredentials("The issuer does not publish the access token's key for signatures.")
            for key in signing_keys:
                with suppress(jwt.InvalidAlgorithmError, jwt.InvalidSignatureError):
                    claims = jwt.decode(
                        token,
                        key.public_key,
                        algorithms=key.algorithms,
                        issuer=issuer,
                        audience=audience,  # If it is None, PyJWT rejects tokens that have an audience.
                        leeway=self._settings.auth_leeway_seconds,
                        options={"require": ["exp", "iss", "aud"] if audience else ["exp", "iss"]},
                    )
                    return self._caller(claims)
            raise InvalidCredentials("The access token is not valid: its signature or its alg is wrong.")
        except jwt.MissingRequiredClaimError as error:
            raise InvalidCredentials(f"The access token lacks the claim {error.claim}.") from None
        except (jwt.PyJWTError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidCredentials(_REASONS.get(type(error), _NOT_VALID)) from None

    def _check_header(self, header: dict[str, Any]) -> None:
        """Reject tokens that cannot be access tokens of the issuer, before any cryptography."""
        if header.get("alg") not in ALGORITHMS:
            raise InvalidCredentials("The access token is signed with an algorithm that is not accepted.")
        if _media_type(str(header.get("typ", "none"))) not in self._types:
            raise InvalidCredentials(
                f"The token is not an access token: its typ must be {self._settings.auth_token_types}."
            )
        if "kid" not in header:
            raise jwt.InvalidTokenError  # as for a `kid` that is no text

    def _check_claims(self, claims: dict[str, Any]) -> None:
        latest = time.time() + self._settings.auth_leeway_seconds
        for claim in _TYPES.keys() & claims.keys():
            if not isinstance(claims[claim], _TYPES[claim]):
                raise InvalidCredentials(f"The access token is not valid: its {claim} has the wrong type.")
            if claim in ("iat", "nbf") and claims[claim] > latest:
                raise InvalidCredentials(f"By the service's clock, the token's {claim} is in the future.")

    def _caller(self, claims: dict[str, Any]) -> Caller | InternalReader:
        expires_at = claims["exp"] + self._settings.auth_leeway_seconds
        if "cnf" in claims:  # We could not verify that the caller has the key (RFC 7800, 8705 and 9449).
            raise InvalidCredentials("The access token is bound to a key: request one that is not.")
        if not self._is_standard:
            self._check_kind(claims)
        client = self._client(claims)
        scopes = self._scopes(claims)
        if READ_ALL in scopes and client in self._internal_clients:
            return InternalReader(client, expires_at)
        client_id = str(claims.get("client_id", client))
        return Caller(client, _NOT_STORABLE.sub("", client_id), scopes, expires_at)

    def _check_kind(self, claims: dict[str, Any]) -> None:
        for claim, access in _KINDS.items():
            # Without an audience, token_use is needed, because little else sets an ID token apart.
            presumed = None if claim == "token_use" and self._settings.auth_audience is None else access
            if claims.get(claim, presumed) != access:
                raise InvalidCredentials(
                    f"The token is not an access token: its claim {claim} must be {access}."
                )

    def _client(self, claims: dict[str, Any]) -> str:
        """Return the name of the client: a conveyancer's id, or the name of an internal reader.

        One claim names both: with two, a token could name a firm in one and a reader in the other. The claim
        is safe if the client cannot set it, as is true of the client's id. A name makes an internal reader
        only if the operators list it, and the issuer grants READ_ALL.
        """
        claim = self._settings.auth_client_claim
        client = claims.get(claim)
        if not isinstance(client, str) or not client or _NOT_STORABLE.search(client):
            raise InvalidCredentials(f"The access token names no client: its {claim} must be a text.")
        # Without an audience, a token may be for any service of the issuer, so clients must be listed.
        is_limited = self._clients or self._settings.auth_audience is None
        if is_limited and client not in self._clients:
            raise InvalidCredentials("The access token is from a client that the service does not accept.")
        return client

    def _scopes(self, claims: dict[str, Any]) -> frozenset[str]:
        """Return the token's scopes of this service, from one string (RFC 9068, section 2.2.3) or a list."""
        granted = claims.get(self._settings.auth_scope_claim, "")
        if isinstance(granted, str):
            granted = granted.split(" ")
        if not isinstance(granted, list):
            raise InvalidCredentials(
                "The access token's scopes are neither a string, with spaces between them, nor a list."
            )
        prefix = self._settings.auth_scope_prefix
        scopes = frozenset(scope for scope in (READ, WRITE, READ_ALL) if prefix + scope in granted)
        if not scopes and not self._is_standard:
            raise InvalidCredentials(
                "The access token has none of this service's scopes, so it may be an ID token."
            )
        return scopes


def is_jwt(token: str) -> bool:
    """Whether *token* has the three parts of a signed JWT, as every access token has (RFC 7515)."""
    return token.count(".") == 2


def _check_form(token: str) -> None:
    if len(token) > _LARGEST_TOKEN:
        raise InvalidCredentials(
            f"The access token has {len(token)} characters: at most {_LARGEST_TOKEN} are accepted."
        )
    if not is_jwt(token):
        raise InvalidCredentials(
            "The token is no JWT, as access tokens are: an API key opens only the questionnaire, and a "
            "request's secret only GET /v1/request/{uuid}."
        )


def _media_type(name: str) -> str:
    return name.lower().removeprefix("application/")  # The prefix may be left out (RFC 7515, section 4.1.9).


def _names(setting: str) -> set[str]:
    """Return the names in a setting, which are separated by commas."""
    return {each.strip() for each in setting.split(",")} - {""}
