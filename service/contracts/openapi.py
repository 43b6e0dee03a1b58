"""The OpenAPI document, generated from the handlers, types and errors.

Litestar's own generator leaves out `additionalProperties`, headers, and everything else that the router does
not know. The examples of failures are the actual responses to those errors.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import MediaType

from service.api.envelope import Envelope, ErrorEnvelope, FieldError, succeed
from service.api.errors import translate
from service.api.request_body import TEXT, CreateBody
from service.authentication.access_tokens import READ, READ_ALL, WRITE
from service.calculation_requests.event_history import CalculationRequestEvents
from service.calculation_requests.field_docs import REASON_CHARACTERS
from service.contracts import asyncapi
from service.contracts.endpoints import ANY_FAILURE, OPERATIONS, Operation
from service.contracts.parameters import HEADERS, PARAMETERS
from service.outbox import events
from service.outbox.events import RequestEvent
from service.server.asgi import Response

_ABOUT = """\
Case-management systems store requests for Stamp Duty Land Tax calculations here, on behalf of their
customers, and read them back. Each customer is e-mailed a link.

Every answer is an envelope. On success `errors` is null; on failure `data` is null and `errors` lists every
failing field at once. Distinguish errors by `code`. Besides what the examples show, a field can be refused
as `blank`, `too_long`, `too_deep`, `invalid_type`, `invalid_choice` or `invalid_characters`. If a query
parameter is given twice, the code is `repeated`.

Besides the answers listed here: a path that does not exist, or is spelt differently (with a double or
trailing slash, or percent-encoded), gets 404 `not_found`. A method that a path does not have gets 405
`method_not_allowed` and the header `Allow`. An invalid `Host` gets 400 `malformed_request`. A
`Transfer-Encoding` other than `chunked` gets 501 `unsupported_transfer_encoding`. Input that is not HTTP gets
400, and a request line and headers larger than 64 KiB get 431, both without a body. Each path that has GET
also has HEAD, which is GET without the body. OPTIONS gets 204 and `Allow`.

New fields, error codes and types of events may be added within this version: ignore fields and events that
you do not know, and decide about an error with an unknown code by its HTTP status. The version of this
document is the version in the paths. Such additions do not change it."""

_ACCESS_TOKEN = "access_token"  # noqa: S105 - the name of a security scheme
_CLIENT_CREDENTIALS = "client_credentials"
_SECURITY_SCHEMES: dict[str, Any] = {
    _ACCESS_TOKEN: {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT",
        "description": "An OAuth 2.0 access token (RFC 9068) from the issuer that the service trusts. Create "
        f"needs the scope `{WRITE}`, reading needs `{READ}`. With `{READ_ALL}`, a client that the operators "
        "have made an internal reader can read any firm's requests and events by uuid, without the secrets, "
        "and the questionnaire. It cannot create or list requests, and needs no conveyancer.",
    },
    "request_secret": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "43 letters, digits, `-` and `_`",
        "description": "The `secret` of a request, which is also in its `request_url`. It opens only this "
        "request. The server of the page behind that link sends it. It is never taken from a query string.",
    },
    "api_key": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "cr_<prefix>_<secret>",
        "description": "An API key, issued by the operators of the service.",
    },
}
_SCOPES = {
    WRITE: "Create requests.",
    READ: "Read requests.",
    READ_ALL: "Read the requests of every firm: for internal readers.",
}

# The reason of a waiver is checked only if the fee is to be waived.
_REASON = {"type": "string", "minLength": 1, "maxLength": REASON_CHARACTERS, **TEXT}
_WITH_REASON = {
    "properties": {"calculation_fee_exempt_reason": _REASON},
    "required": ["calculation_fee_exempt_reason"],
}
_WITHOUT_WAIVER = {"properties": {"calculation_fee_exempt": {"const": False}}}
_WAIVER_RULE = {"dependentSchemas": {"calculation_fee_exempt": {"anyOf": [_WITHOUT_WAIVER, _WITH_REASON]}}}


@cache
def document(token_url: str | None = None) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. With *token_url* it says where to get access tokens."""
    schemes = dict(_SECURITY_SCHEMES)
    if token_url is not None:
        # This scheme is for the same tokens as the first scheme, and shows how to request them.
        schemes[_CLIENT_CREDENTIALS] = {
            "type": "oauth2",
            "description": "An access token, requested with the id and the secret of a client of the issuer.",
            "flows": {"clientCredentials": {"tokenUrl": token_url, "scopes": _SCOPES}},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Calculation requests", "version": "1", "description": _ABOUT},
        "servers": [{"url": "/", "description": "The server that this document comes from."}],
        "tags": [
            {"name": "requests", "description": "Requests for calculations."},
            {"name": "questionnaire", "description": "The questions that customers answer."},
        ],
        "paths": _paths(schemes),
        "components": {
            "schemas": _schemas(),
            "parameters": {name: {"name": name} | parameter for name, parameter in PARAMETERS.items()},
            "securitySchemes": schemes,
        },
    }


def _paths(schemes: Mapping[str, Any]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        (path,) = operation.handler.paths
        item = paths.setdefault(re.sub(r":\w+}", "}", path), {})
        item["post" if operation.bodies else "get"] = _describe(operation, schemes)
    return paths


def _describe(operation: Operation, schemes: Mapping[str, Any]) -> dict[str, Any]:
    summary, _, description = (inspect.getdoc(operation.handler.fn) or "").partition(".")
    described: dict[str, Any] = {
        "operationId": operation.handler.handler_name,
        "summary": summary,
        **({"description": description.strip()} if description else {}),
        "tags": [operation.tag],
        "security": [
            *operation.security,
            *(
                {_CLIENT_CREDENTIALS: each[_ACCESS_TOKEN]}
                for each in operation.security
                if _CLIENT_CREDENTIALS in schemes and _ACCESS_TOKEN in each
            ),
        ],
        "parameters": [
            _reference("parameters", name) for name in (*operation.parameters, "X-Request-Id", "traceparent")
        ],
        "responses": _responses(operation),
    }
    if operation.bodies:
        schema = _reference("schemas", CreateBody.__name__)
        described["requestBody"] = {"required": True} | _content(schema, operation.bodies)
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    answers = {name: succeed(example) for name, example in operation.examples.items()}
    schema = _reference("schemas", f"Envelope_{operation.payload.__name__}_")
    responses = {"200": _response(HTTPStatus.OK, operation.headers) | _content(schema, answers)}
    if operation.links:
        responses["200"]["links"] = operation.links
    if "If-None-Match" in operation.parameters:
        responses["304"] = _response(HTTPStatus.NOT_MODIFIED, operation.headers)
    return responses | _failures({**operation.failures, **ANY_FAILURE})


def _failures(failures: Mapping[str, Exception]) -> dict[str, Any]:
    """Describe the answers to *failures* by status."""
    by_status: dict[HTTPStatus, dict[str, Response]] = {}
    for name, failure in failures.items():
        failed = translate(failure).answer()
        by_status.setdefault(failed.status, {})[name] = failed
    described = {}
    for status, answers in sorted(by_status.items()):
        examples = {name: msgspec.json.decode(failed.body) for name, failed in answers.items()}
        described[str(status.value)] = _response(status, _shared_headers(answers.values()))
        described[str(status.value)] |= _content(_reference("schemas", ErrorEnvelope.__name__), examples)
    return described


def _shared_headers(answers: Iterable[Response]) -> dict[str, bool]:
    """Return the headers that any of the answers has. True means that all of the answers have the header."""
    sent = [{name.decode() for name, _ in each.headers} for each in answers]
    return {
        name: all(name.lower() in names for names in sent)
        for name in HEADERS
        if any(name.lower() in names for names in sent)
    }


def _response(status: HTTPStatus, headers: Mapping[str, bool]) -> dict[str, Any]:
    is_always_sent = {"X-Request-Id": True, **headers}
    return {
        "description": status.phrase,
        "headers": {
            name: HEADERS[name] | {"required": is_always_sent[name]} for name in sorted(is_always_sent)
        },
    }


def _content(schema: dict[str, Any], examples: Mapping[str, Any]) -> dict[str, Any]:
    values = msgspec.to_builtins(dict(examples))
    for value in values.values():
        if "meta" in value:  # Constant, so that the document does not change.
            value["meta"]["timestamp"] = "2026-03-02T09:30:00.123456+00:00"
    named = {name: {"value": value} for name, value in values.items()}
    return {"content": {MediaType.JSON: {"schema": schema, "examples": named}}}


def _schemas() -> dict[str, Any]:
    payloads = [Envelope[operation.payload] for operation in OPERATIONS]  # type: ignore[name-defined]
    schemas = asyncapi.generate(CreateBody, *payloads, ErrorEnvelope)
    _name_events(schemas)
    for schema in schemas.values():
        schema["description"] = inspect.cleandoc(schema["description"])
        schema.pop("title", None)  # The name of a class, which RapiDoc would show.
    for event in events.SENT:  # Otherwise RapiDoc would show the component's name.
        schemas[asyncapi.schema_name(event)]["title"] = f"{event.type} event"
    schemas[asyncapi.schema_name(RequestEvent)]["title"] = "another event"
    body = schemas[CreateBody.__name__]
    body |= _WAIVER_RULE
    for field in body["properties"].values():
        field.pop("default", None)  # openapi-typescript would make the field required.
    code = schemas[FieldError.__name__]["properties"]["code"]
    # With an enum, generated clients would fail on a code that a later release adds.
    code |= {"type": "string", "examples": code.pop("enum")}
    return {name: _with_null_in_type(schema) for name, schema in schemas.items()}


def _with_null_in_type(schema: Any) -> Any:  # noqa: ANN401 - any part of a schema
    """Write `anyOf` of a type and null as one schema with both types, which generators understand better."""
    match schema:
        case {"anyOf": [{"type": str() as kind, **limits}, {"type": "null"}], **others}:
            return _with_null_in_type({**others, **limits, "type": [kind, "null"]})
        case dict():
            return {name: _with_null_in_type(part) for name, part in schema.items()}
    return schema


def _name_events(schemas: dict[str, Any]) -> None:
    """Describe each type of event by its own schema, and other types by that of RequestEvent, the base class.

    Events differ in `type`. A `discriminator` would show our schemas' names on the page. With `oneOf`,
    generated clients that ignore `not` would find that an event fits two schemas, and refuse the event.
    """
    schemas.update(asyncapi.sent_schemas())
    names = [asyncapi.schema_name(event) for event in events.SENT]
    for name in names:
        del schemas[name]["properties"]["traceparent"]
    other = asyncapi.schema_name(RequestEvent)
    schemas[other] = {
        **schemas[names[0]],
        "description": "An event of a type that a later release may add: ignore it.",
        "properties": {
            **schemas[names[0]]["properties"],
            "type": {"type": "string", "not": {"enum": list(events.EVENT_TYPES)}},
            "data": _reference("schemas", RequestEvent.__name__),
        },
    }
    schemas[CalculationRequestEvents.__name__]["properties"]["events"]["items"] = {
        "anyOf": [_reference("schemas", name) for name in (*names, other)]
    }


def _reference(kind: str, name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/{kind}/{name}"}
