"""The guards of the handlers: they shed load, and authenticate the caller.

They are `before_request` hooks. Litestar's own `guards`, which also run before the body is read, take 20 µs
more in each HTTP request, of 60 to 100, because Litestar copies the handler for them.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, TypeAlias

import msgspec
from litestar import Request
from litestar.types import BeforeRequestHookHandler

from service.api.errors import ApiError
from service.api.resources import Resources
from service.authentication.access_tokens import is_jwt
from service.authentication.api_keys import looks_like_api_key
from service.calculation_requests.request_secrets import WrongSecret, looks_like_secret
from service.server.asgi import header_values

AnyRequest: TypeAlias = Request[Any, Any, Any]


class SecretHolder(msgspec.Struct, frozen=True):
    """A caller whose token has the form of a secret. The secret is checked when its request is read."""

    secret: str


def requires(scope: str) -> BeforeRequestHookHandler:
    """Return the guard of an endpoint that needs Postgres and an access token with *scope*."""

    async def admit(request: AnyRequest) -> None:
        authenticator = _shed_load(request).authenticator
        request.scope["user"] = authenticator.verify_access_token(_token(request), scope=scope)

    return admit


async def requires_reader(request: AnyRequest) -> None:
    """Admit a conveyancer's caller with the scope READ, or an internal reader."""
    request.scope["user"] = _shed_load(request).authenticator.verify_reader(_token(request))


async def requires_reader_or_secret(request: AnyRequest) -> None:
    """Admit a reader, or a caller whose token may be the secret of the request."""
    authenticator = _shed_load(request).authenticator
    token = _token(request)
    if is_jwt(token) or looks_like_api_key(token):
        request.scope["user"] = authenticator.verify_reader(token)
    elif looks_like_secret(token):
        request.scope["user"] = SecretHolder(token)
    else:
        raise WrongSecret


async def requires_api_key_or_token(request: AnyRequest) -> None:
    """Admit to the questionnaire a caller with an API key or any access token.

    Access tokens are verified without Postgres, so their callers are served even while Postgres is down.
    """
    resources: Resources = request.app.state.resources
    await resources.authenticator.verify_api_key_or_token(_token(request))


def _shed_load(request: AnyRequest) -> Resources:
    """Return the resources. Raises PostgresUnavailable while Postgres is down or the pool's queue is full.

    This comes before authentication, because rejecting a request later costs almost as much as serving it.
    """
    resources: Resources = request.app.state.resources
    resources.pool.check_available()
    return resources


def _token(request: AnyRequest) -> str:
    return bearer_token(header_values(request.scope, b"authorization"))


def bearer_token(authorization: Sequence[str]) -> str:
    """Return the bearer token, of any kind, from the values of the Authorization headers. Raises ApiError.

    Two headers are rejected, because a gateway may have checked the one that we would not read. If there is
    no token, the challenge has no error code (RFC 6750, section 3.1).
    """
    if len(authorization) > 1:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            "malformed_request",
            "There is more than one Authorization header: send one.",
            challenge="invalid_request",
        )
    scheme, _, token = "".join(authorization).partition(" ")
    token = token.strip(" ")  # A plain strip() would also remove spaces that are not ASCII.
    if scheme.lower() != "bearer" or not token:
        raise ApiError(
            HTTPStatus.UNAUTHORIZED,
            "unauthenticated",
            "There is no Bearer token: send `Authorization: Bearer …` with an access token; a request's "
            "secret also opens that request, and an API key opens the questionnaire.",
            challenge="",
        )
    return token
