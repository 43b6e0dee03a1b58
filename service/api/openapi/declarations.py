"""What handlers declare for the document, and the errors that follow from what they take."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Self, get_args

import msgspec
from litestar.exceptions import ClientException
from litestar.openapi.spec import Parameter

from service.api.api_request import body_overdue, body_too_large, check_declared
from service.api.decoding import Sent, parse
from service.api.errors import ApiError
from service.api.guards import bearer_token
from service.authentication.access_tokens import InvalidCredentials
from service.authentication.authenticator import InsufficientScope
from service.authentication.signing_keys import SigningKeysUnavailable
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import AlreadyErased, RequestNotFound, RetrievedCalculationRequest
from service.calculation_requests.request_secrets import SecretKeyMissing
from service.postgres.outages import PostgresUnavailable

MALFORMED_BODY = b'{"customer_email": "ada@customer.example.com",}'
LARGE_BODY = 300_000  # bytes


class Documented(msgspec.Struct, frozen=True, kw_only=True):
    """What the document says of a handler, beside what follows from its signature and decorator.

    *answers* are payloads, and *failures* are errors, by the names of their examples. The example of an error
    is the actual response to it. What `common_failures` returns need not be listed. A handler with a body has
    a *refused_body*, in which fields are invalid. Valid bodies are made of the examples of the fields.
    *parameters* are headers that the handler reads itself. *headers* are those that successful answers can
    have: sets of names, in lower case.
    """

    answers: Mapping[str, msgspec.Struct] = {}
    refused_body: bytes = b""
    failures: Mapping[str, Exception] = {}
    parameters: Sequence[Parameter] = ()
    headers: Sequence[AbstractSet[str]] = (frozenset(),)
    links: Mapping[str, Any] = {}

    def __deepcopy__(self, _memo: object) -> Self:
        """Return itself. Litestar copies handlers, and not every exception can be copied."""
        return self


def link(name: str, *, to: str, **parameters: str) -> dict[str, Any]:
    """Return a link to another operation, whose parameters are taken from the answer."""
    return {name: {"operationId": to, "parameters": parameters}}


def refusal(check: Callable[..., object], *arguments: object) -> ApiError:
    """Return the error that *check* raises."""
    try:
        check(*arguments)
    except ApiError as error:
        return error
    raise ValueError(check)


_ALWAYS: Mapping[str, Exception] = {
    "bad_host": ClientException(),
    "two_tokens": refusal(bearer_token, ["Bearer one", "Bearer two"]),
    "no_token": refusal(bearer_token, []),
    "not_bearer": refusal(bearer_token, ["Basic YTpi"]),
    "expired_token": InvalidCredentials("The access token has expired: request a new one."),
    "unforeseen": Exception(),
    "database_unavailable": PostgresUnavailable(),
    "signing_keys_unavailable": SigningKeysUnavailable(),
}
_OF_A_BODY: Mapping[str, Exception] = {
    "malformed": refusal(parse, Sent, MALFORMED_BODY),
    "too_slow": body_overdue(),
    "too_large": body_too_large(LARGE_BODY),
    "no_content_type": refusal(check_declared, "", ""),
    "not_json": refusal(check_declared, "text/plain", ""),
    "compressed": refusal(check_declared, "application/json", "gzip"),
}


def common_failures(operation: dict[str, Any], path: str, answer: object) -> dict[str, Exception]:
    """Return the failures that follow from an operation's body, path, scope, and the type of its answer."""
    failures = dict(_ALWAYS)
    (payload,) = get_args(answer)  # of an Envelope
    if issubclass(payload, RetrievedCalculationRequest):
        failures["secret_key_missing"] = SecretKeyMissing()
    if "requestBody" in operation:
        failures |= _OF_A_BODY
    if "{uuid}" in path:
        failures |= {"unknown_uuid": RequestNotFound(), "erased": AlreadyErased()}
    scopes = [scope for each in operation.get("security", ()) for scope in each.get("access_token", ())]
    if scopes:
        failures |= {
            "insufficient_scope": InsufficientScope(scopes[0]),
            "unknown_conveyancer": UnknownConveyancer(),
        }
    return failures
