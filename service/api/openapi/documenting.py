"""What Litestar's OpenAPI generator cannot do, with the places in Litestar's source.

- A handler has no arguments for examples of bodies and of successful answers, and for headers of errors
  (`_openapi/responses.py`, `_openapi/request_body.py`), and examples lose their nulls
  (`openapi/spec/base.py`). So a handler's `opt` has a Documented.
- Schemas lack constraints, `extra_json_schema` and `additionalProperties`
  (`_openapi/schema_generation/schema.py`). `complete` replaces them by those that msgspec makes.
- A dependency's parameters are those of its signature (`_openapi/parameters.py`), which a struct of them
  has not. `complete` adds them.

The same document by `operation_class`, an `OpenAPISchemaPlugin` and a render plugin took 367 lines, and lost
second examples, headers, the waiver's rule, and the page's dark theme and accessibility.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Self, get_args

import msgspec
from litestar import Litestar, MediaType, Response
from litestar.exceptions import ClientException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Parameter
from litestar.routes import HTTPRoute
from msgspec.structs import replace

from service.api.api_request import body_overdue, check_declared
from service.api.decoding import Sent, parse, parse_query
from service.api.envelope import ErrorEnvelope, Meta, fail, succeed
from service.api.errors import ApiError, translate
from service.api.guards import bearer_token
from service.api.openapi import schemas
from service.api.openapi.examples import bodies_of
from service.authentication.access_tokens import InvalidCredentials
from service.authentication.authenticator import InsufficientScope
from service.authentication.signing_keys import SigningKeysUnavailable
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.model import AlreadyErased, RequestNotFound, RetrievedCalculationRequest
from service.calculation_requests.request_secrets import SecretKeyMissing
from service.postgres.outages import PostgresUnavailable

MALFORMED_BODY = b'{"customer_email": "ada@customer.example.com",}'
_META = Meta("2026-03-02T09:30:00.123456+00:00")  # of all examples, so that the document does not change


class Documented(msgspec.Struct, frozen=True, kw_only=True):
    """What the document says of a handler, beside what follows from its signature and decorator.

    *answers* are payloads, and *failures* are errors, by the names of their examples. The example of an error
    is the actual response to it. What `_failures` adds need not be listed. A handler with a body or a query
    has one that is *refused*, with invalid fields. Valid bodies are made of the examples of the fields.
    *parameters* are headers that the handler reads itself. *headers* are those that successful answers can
    have, in lower case.
    """

    answers: Mapping[str, msgspec.Struct] = {}
    refused: bytes = b""
    failures: Mapping[str, Exception] = {}
    parameters: Sequence[Parameter] = ()
    headers: Collection[str] = ()

    def __deepcopy__(self, _memo: object) -> Self:
        """Return itself. Litestar copies handlers, and not every exception can be copied."""
        return self


def refusal(check: Callable[..., object], *arguments: object) -> ApiError:
    """Return the error that *check* raises."""
    try:
        check(*arguments)
    except ApiError as error:
        return error
    raise ValueError(check)


@lru_cache(maxsize=1)
def complete(app: Litestar) -> dict[str, Any]:
    """Return the OpenAPI document of an application."""
    document = app.openapi_schema.to_schema()
    routes = [route for route in app.routes if isinstance(route, HTTPRoute)]
    handlers = {handler.handler_name: handler for route in routes for handler in route.route_handlers}
    types: list[Any] = [ErrorEnvelope]
    for path, item in document["paths"].items():
        for operation in item.values():
            types += _describe(operation, path, handlers[operation["operationId"]])
    document["components"]["schemas"] = schemas.generate(*types)
    return document


def _describe(operation: dict[str, Any], path: str, handler: HTTPRouteHandler) -> list[Any]:
    """Complete an operation. Return the types that it takes and answers."""
    documented: Documented = handler.opt["documented"]
    returned = handler.parsed_return_field
    answer = (returned.inner_types[0] if returned.is_subclass_of(Response) else returned).annotation
    operation["summary"], _, description = operation.pop("description").partition(".")
    if description:
        operation["description"] = description.strip()
    fields = handler.parsed_fn_signature.parameters.items()
    queries = [field.annotation for name, field in fields if field.is_subclass_of(Sent) and name != "data"]
    operation["parameters"] = [
        *operation.get("parameters", ()),
        *(parameter for query in queries for parameter in schemas.parameters(query)),
        *(each.to_schema() for each in documented.parameters),
    ]
    failures = _failures(operation, path, answer) | dict(documented.failures)
    for query in queries:
        failures["refused_parameters"] = refusal(parse_query, query, documented.refused)
    types = [answer]
    if handler.parsed_data_field:
        body = handler.parsed_data_field.annotation
        operation["requestBody"]["content"] = _content(body, bodies_of(body))
        failures["refused_fields"] = refusal(parse, body, documented.refused)
        types.append(body)
    operation["responses"] = _answers(answer, documented) | _refusals(failures)
    return types


def _failures(operation: dict[str, Any], path: str, answer: object) -> dict[str, Exception]:
    """Return the failures that follow from an operation's body, path, scope, and the type of its answer."""
    failures: dict[str, Exception] = {
        "bad_host": ClientException(),
        "two_tokens": refusal(bearer_token, ["Bearer one", "Bearer two"]),
        "no_token": refusal(bearer_token, []),
        "expired_token": InvalidCredentials("The access token has expired: request a new one."),
        "unforeseen": Exception(),
        "database_unavailable": PostgresUnavailable(),
        "signing_keys_unavailable": SigningKeysUnavailable(),
    }
    (payload,) = get_args(answer)  # of an Envelope
    if issubclass(payload, RetrievedCalculationRequest):
        failures["secret_key_missing"] = SecretKeyMissing()
    if "requestBody" in operation:
        failures |= {
            "malformed": refusal(parse, Sent, MALFORMED_BODY),
            "too_slow": body_overdue(),
            "too_large": RequestEntityTooLarge(),
            "not_json": refusal(check_declared, "text/plain", ""),
            "compressed": refusal(check_declared, "application/json", "gzip"),
        }
    if "{uuid}" in path:
        failures |= {"unknown_uuid": RequestNotFound(), "erased": AlreadyErased()}
    scopes = [scope for each in operation.get("security", ()) for scope in each.get("access_token", ())]
    if scopes:
        failures["insufficient_scope"] = InsufficientScope(scopes[0])
        failures["unknown_conveyancer"] = UnknownConveyancer()
    return failures


def _answers(answer: object, documented: Documented) -> dict[str, dict[str, Any]]:
    """Return the responses that are no errors: 304, too, if the caller may send what it has."""
    headers = schemas.headers(documented.headers)
    examples = {name: replace(succeed(payload), meta=_META) for name, payload in documented.answers.items()}
    ok = {"description": HTTPStatus.OK.phrase, "headers": headers, "content": _content(answer, examples)}
    answers = {"200": ok}
    if any(parameter.name == "If-None-Match" for parameter in documented.parameters):
        answers["304"] = {"description": HTTPStatus.NOT_MODIFIED.phrase, "headers": headers}
    return answers


def _refusals(failures: Mapping[str, Exception]) -> dict[str, dict[str, Any]]:
    by_status: dict[HTTPStatus, dict[str, ApiError]] = {}
    for name, failure in failures.items():
        error = translate(failure)
        by_status.setdefault(error.status, {})[name] = error
    refusals = {}
    for status, named in sorted(by_status.items()):
        examples = {name: replace(fail(status, error.errors), meta=_META) for name, error in named.items()}
        refusals[str(status.value)] = {
            "description": status.phrase,
            "headers": schemas.headers([name for error in named.values() for name in error.headers]),
            "content": _content(ErrorEnvelope, examples),
        }
    return refusals


def _content(kind: object, examples: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: {"value": msgspec.to_builtins(value)} for name, value in examples.items()}
    return {MediaType.JSON.value: {"schema": schemas.reference(kind), "examples": shown}}
