"""The OpenAPI document, made from the handlers, types and errors themselves."""

import inspect
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import MediaType, Response
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler

from service import lines
from service.api import handlers, idempotency_key, list_query, questionnaire
from service.api.envelope import Envelope, ErrorEnvelope, UnsupportedMediaType, answer, succeed
from service.api.errors import InvalidSubmission, MalformedBody
from service.api.idempotency_key import MalformedIdempotencyKey
from service.api.list_query import CalculationRequestPage
from service.api.questionnaire import Questionnaire
from service.api.request_body import FILLED_TEXT, LINE, CreateBody, parse
from service.authentication import authenticator
from service.authentication.authenticator import InsufficientScope, RepeatedCredentials, Unauthenticated
from service.authentication.signing_keys import SigningKeysUnavailable
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.fields import META_DATA_BYTES, META_DATA_DEPTH, REASON_CHARACTERS
from service.calculation_requests.idempotency import IdempotencyKeyInFlight, IdempotencyKeyReused
from service.calculation_requests.model import CalculationRequestView, RequestNotFound
from service.calculation_requests.request_secrets import SecretKeyMissing
from service.postgres.outages import PostgresUnavailable
from service.server.refusals import BodyOverdue

VERSION = "1"

_ABOUT = """\
Stores requests for Stamp Duty Land Tax calculations, which case-management systems make for their
customers, and reads them back; each customer is e-mailed a link.

Every answer is an envelope: on success `errors` is null; on failure `data` is null and `errors` names
every failing field at once. Tell errors apart by `code`. Beside what the examples show, a field is
refused as `blank`, `too_long`, `too_deep`, `invalid_type`, `invalid_choice` or `invalid_characters`, and a
query parameter that is given twice as `repeated`.

Beside what is listed here, a path that does not exist, or is spelt otherwise (with a doubled slash, one at
the end, or percent-encoded), is answered with 404 `not_found`, and a method that a path does not have with
405 `method_not_allowed` and the header `Allow`. What is not HTTP, or has a `Host` that is none, is answered
with 400 `malformed_request`, a first line and headers of more than 64 KiB with 431 `head_too_large`, and
those that do not arrive in time with 408 `request_timeout`. Each path answers HEAD, where it has GET, like
GET without the body; and OPTIONS with 204 and `Allow`.

New fields may be added to answers within this version: ignore those you do not know."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What the document says of an endpoint beyond its handler."""

    handler: HTTPRouteHandler
    tag: str
    security: list[dict[str, list[str]]]
    example: msgspec.Struct  # of the payload, whose type it also gives
    failures: Mapping[str, Exception]  # by the name of their example
    parameters: tuple[str, ...] = ()  # of _PARAMETERS
    headers: Mapping[str, bool] = {}  # of _HEADERS, when it succeeds; True for those that always come
    bare: tuple[HTTPStatus, ...] = ()  # answered without a body
    body: type[msgspec.Struct] | None = None
    body_examples: Mapping[str, Any] = {}
    links: Mapping[str, Any] = {}


def _refusal(check: Callable[[], object]) -> InvalidSubmission:
    try:
        check()
    except InvalidSubmission as error:
        return error
    raise ValueError(check)


SMALLEST_REQUEST: dict[str, Any] = {
    "customer_email": "ada@customer.example.com",
    "customer_first_name": "Ada",
    "customer_last_name": "Lovelace",
    "sender_email": "grace@firm.example.com",
    "sender_organization_name": "Hopper & Partners",
    "sender_first_name": "Grace",
    "sender_last_name": "Hopper",
    "case_ref": "12 High Street",
}
FULL_REQUEST: dict[str, Any] = SMALLEST_REQUEST | {
    "customer_phone": "+44 20 7946 0000",
    "request_type": "SDLT_CALCULATION",
    "property_value": 300_000,
    "notes": "Call before noon.\nCompletion is in May.",
    "external_id": "crm-17",
    "meta_data": {"source": "website", "campaign": {"id": 7, "tags": ["spring", "first-time"]}},
    "calculation_fee_exempt": True,
    "calculation_fee_exempt_reason": "Repeat client",
}
REFUSED_REQUEST = '{"customer_email": "ada", "property_value": -1, "waive_fee": true}'
REFUSED_QUERY = "limit=0&cursor=next&sort=name"
_RECORD = CalculationRequestView(
    **FULL_REQUEST,
    uuid="req_01a9ZkW3mT6qPxB8vNcR4d",
    created_at=datetime(2026, 3, 2, 9, 30, tzinfo=UTC),
    updated_at=datetime(2026, 3, 2, 9, 30, tzinfo=UTC),
    calculation_id=None,
    secret="3q2-7wAAbmV2ZXIgYSByZWFsIHNlY3JldCBoZXJlISE",  # noqa: S106 - an example
    request_url="https://app.example.com/calculator/request/req_01a9ZkW3mT6qPxB8vNcR4d"
    "?secret=3q2-7wAAbmV2ZXIgYSByZWFsIHNlY3JldCBoZXJlISE",
)

_ANY_FAILURE: Mapping[str, Exception] = {
    "bad_host": HTTPException(status_code=HTTPStatus.BAD_REQUEST),
    "two_tokens": RepeatedCredentials(),
    "no_token": Unauthenticated(),
    "expired_token": Unauthenticated("The access token expired"),
    "unforeseen": Exception(),
    "database_away": PostgresUnavailable(),
    "keys_away": SigningKeysUnavailable(),
}


def operations() -> list[Operation]:
    """Return every operation of the API: a new endpoint, error or header has its line here."""
    return [
        Operation(
            handler=handlers.create_request,
            tag="requests",
            security=[{"access_token": [authenticator.WRITE]}],
            parameters=("Idempotency-Key",),
            headers={idempotency_key.REPLAYED: False},
            body=CreateBody,
            body_examples={"smallest": SMALLEST_REQUEST, "full": FULL_REQUEST},
            example=_RECORD,
            links={
                "retrieve": {
                    "operationId": "retrieve_request",
                    "parameters": {"uuid": "$response.body#/data/uuid"},
                }
            },
            failures={
                "malformed": MalformedBody(),
                "malformed_key": MalformedIdempotencyKey(),
                "insufficient_scope": InsufficientScope(authenticator.WRITE),
                "unknown_conveyancer": UnknownConveyancer(),
                "too_slow": BodyOverdue(),
                "too_large": HTTPException(status_code=HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
                "not_json": UnsupportedMediaType(),
                "key_in_flight": IdempotencyKeyInFlight(),
                "key_reused": IdempotencyKeyReused(),
                "secret_key_missing": SecretKeyMissing("older"),
                "refused_fields": _refusal(
                    lambda: parse(REFUSED_REQUEST.encode()).validated(waiver_applies=False)
                ),
            },
        ),
        Operation(
            handler=handlers.list_requests,
            tag="requests",
            security=[{"access_token": [authenticator.READ]}],
            parameters=("external_id", "limit", "cursor"),
            example=CalculationRequestPage([_RECORD], _RECORD.uuid),
            links={
                "next_page": {
                    "operationId": "list_requests",
                    "parameters": {"cursor": "$response.body#/data/next_cursor"},
                }
            },
            failures={
                "insufficient_scope": InsufficientScope(authenticator.READ),
                "unknown_conveyancer": UnknownConveyancer(),
                "refused_parameters": _refusal(lambda: list_query.parse_listing(REFUSED_QUERY.encode())),
            },
        ),
        Operation(
            handler=handlers.retrieve_request,
            tag="requests",
            security=[{"access_token": [authenticator.READ]}],
            parameters=("uuid",),
            example=_RECORD,
            failures={
                "insufficient_scope": InsufficientScope(authenticator.READ),
                "unknown_conveyancer": UnknownConveyancer(),
                "unknown_uuid": RequestNotFound(),
                "secret_key_missing": SecretKeyMissing("older"),
            },
        ),
        Operation(
            handler=handlers.questionnaire_structure,
            tag="questionnaire",
            security=[{"api_key": []}, {"access_token": []}],
            parameters=("If-None-Match",),
            headers={"ETag": True, "Cache-Control": True},
            bare=(HTTPStatus.NOT_MODIFIED,),
            example=Questionnaire(questionnaire.load().questionnaire[:4]),
            failures={},
        ),
    ]


_UUID_PATTERN = "^req_[0-6][0-9A-Za-z]{21}$"
_PARAMETERS: dict[str, dict[str, Any]] = {
    "uuid": {
        "in": "path",
        "required": True,
        "description": "The identifier that create returned.",
        "schema": {"type": "string"},
        "example": _RECORD.uuid,
    },
    "external_id": {
        "in": "query",
        "description": "Only requests with this identifier in the caller's own system.",
        "schema": {"type": "string", "maxLength": lines.CHARACTERS, **LINE},
    },
    "limit": {
        "in": "query",
        "description": "How many requests a page has at most.",
        "schema": {
            "type": "integer",
            "minimum": 1,
            "maximum": list_query.LARGEST_LIMIT,
            "default": list_query.DEFAULT_LIMIT,
        },
    },
    "cursor": {
        "in": "query",
        "description": "The `next_cursor` of the page before; without it, the first page.",
        "schema": {"type": "string", "pattern": _UUID_PATTERN},
    },
    "Idempotency-Key": {
        "in": "header",
        "description": "Makes it safe to send a request again: the same key and body, the same request. Up "
        "to 255 characters, a UUID for instance; in double quotes it may have spaces and other punctuation.",
        "schema": {"type": "string", "pattern": idempotency_key.PATTERN},
    },
    "If-None-Match": {
        "in": "header",
        "description": "The `ETag` of the questions that the caller has.",
        "schema": {"type": "string"},
    },
    "X-Request-Id": {
        "in": "header",
        "description": "Repeated in the answer and written to the log, if it is up to 128 letters, digits, "
        "`.`, `_` or `-` and begins with a letter or digit; another one is replaced.",
        "schema": {"type": "string"},
        "example": "case-17",
    },
    "traceparent": {
        "in": "header",
        "description": "W3C Trace Context, passed on with the events; ignored when malformed.",
        "schema": {"type": "string"},
        "example": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    },
}

_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The caller's, or a new one: quote it to the people who run the service.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"},
        "example": "case-17",
    },
    "WWW-Authenticate": {
        "description": "What is wrong with the token (RFC 6750, section 3).",
        "schema": {"type": "string", "pattern": "^Bearer "},
        "example": 'Bearer realm="calculation-requests"',
    },
    idempotency_key.REPLAYED: {
        "description": "This request was stored before, with the same `Idempotency-Key`; else absent.",
        "schema": {"type": "string", "const": "true"},
    },
    "ETag": {
        "description": "Changes with the questions.",
        "schema": {"type": "string", "pattern": '^W/"'},
    },
    "Cache-Control": {
        "description": "The caller may keep the answer, and asks each time whether it is current.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds to wait before another attempt.",
        "schema": {"type": "integer", "minimum": 1},
        "example": 1,
    },
}

_SECURITY_SCHEMES = {
    "access_token": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT",
        "description": "An OAuth 2.0 access token (RFC 9068) of the issuer that the service trusts. Its "
        f"scope must be `{authenticator.WRITE}` to create and `{authenticator.READ}` to read.",
    },
    "api_key": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "cr_<prefix>_<secret>",
        "description": "An API key that the people who run the service have issued.",
    },
}

_ADDRESS = ": one recipient, in ASCII before the @, without encoded words (`=?…?=`)."
_DESCRIPTIONS = {
    "customer_email": f"E-mail address of the client who asks for the calculation{_ADDRESS}",
    "customer_phone": "Phone number of the client, in any form. Empty is stored as null.",
    "sender_email": f"E-mail address of the person or organization that sends the request{_ADDRESS}",
    "case_ref": "The sender's own reference of the case.",
    "property_value": "In pounds.",
    "notes": "Internal notes; may have several lines. Empty is stored as null.",
    "external_id": "Identifier in the caller's own system. Empty is stored as null.",
    "meta_data": f"Arbitrary data: at most {META_DATA_BYTES} bytes of JSON and {META_DATA_DEPTH} levels.",
    "calculation_fee_exempt": "Waives the conveyancer's calculation fee; only at creation. Stored as "
    "false when the conveyancer charges none.",
    "calculation_fee_exempt_reason": "Required when the fee is waived, otherwise ignored: at most "
    f"{REASON_CHARACTERS} characters.",
    "calculation_id": "Null until a calculation has been made.",
    "secret": "Opens this request and its calculation.",
    "request_url": "Where the customer answers the questions; the same link as in the e-mail.",
}

# What the types cannot say. A keyword concerns values of its own type only, so this is any JSON value.
_JSON_VALUE = {
    "description": "Any JSON value without NUL characters, its numbers within the range of 64-bit integers.",
    "minimum": -(2**63),
    "maximum": 2**63 - 1,
    "pattern": r"^[^\u0000]*$",
    "items": {"$ref": "#/components/schemas/JsonValue"},
    "propertyNames": {"pattern": r"^[^\u0000]*$"},
    "additionalProperties": {"$ref": "#/components/schemas/JsonValue"},
}
_META_DATA = {name: _JSON_VALUE[name] for name in ("propertyNames", "additionalProperties")}

# The reason of a waiver is looked at only if there is one.
_WAIVER_RULE = {
    "dependentSchemas": {
        "calculation_fee_exempt": {
            "anyOf": [
                {"properties": {"calculation_fee_exempt": {"const": False}}},
                {
                    "properties": {
                        "calculation_fee_exempt_reason": {
                            "type": "string",
                            "maxLength": REASON_CHARACTERS,
                            **FILLED_TEXT,
                        }
                    },
                    "required": ["calculation_fee_exempt_reason"],
                },
            ]
        }
    }
}


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    every = operations()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Calculation requests", "version": VERSION, "description": _ABOUT},
        "servers": [{"url": "/", "description": "where this document was fetched"}],
        "tags": [
            {"name": "requests", "description": "Requests for calculations."},
            {"name": "questionnaire", "description": "The questions that customers answer."},
        ],
        "paths": _paths(every),
        "components": {
            "schemas": _schemas(every),
            "parameters": {name: {"name": name} | parameter for name, parameter in _PARAMETERS.items()},
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def _paths(every: list[Operation]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for operation in every:
        for path in operation.handler.paths:
            item = paths.setdefault(re.sub(r":\w+}", "}", path), {})
            item |= {method.lower(): _describe(operation) for method in operation.handler.http_methods}
    return paths


def _describe(operation: Operation) -> dict[str, Any]:
    text = inspect.getdoc(operation.handler.fn) or ""
    described: dict[str, Any] = {
        "operationId": operation.handler.handler_name,
        "summary": text.partition(".")[0],
        "description": text,
        "tags": [operation.tag],
        "security": operation.security,
        "parameters": [
            _reference("parameters", name) for name in (*operation.parameters, "X-Request-Id", "traceparent")
        ],
        "responses": _responses(operation),
    }
    if operation.body:
        schema = _reference("schemas", operation.body.__name__)
        described["requestBody"] = {"required": True} | _content(schema, operation.body_examples)
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    (payload,), _ = _generate(Envelope[type(operation.example)])  # type: ignore[misc]
    responses = {"200": _response(HTTPStatus.OK, operation.headers)}
    responses["200"] |= _content(payload, {"ok": succeed(operation.example)})
    if operation.links:
        responses["200"]["links"] = operation.links
    for status in operation.bare:
        responses[str(status.value)] = _response(status, operation.headers)
    return responses | _failures({**operation.failures, **_ANY_FAILURE})


def _failures(failures: Mapping[str, Exception]) -> dict[str, Any]:
    """Describe every status of *failures*; a header always comes when each failure of the status has it."""
    answers: dict[int, dict[str, Response[ErrorEnvelope]]] = {}
    for name, failure in failures.items():
        response = answer(failure)
        answers.setdefault(response.status_code or 500, {})[name] = response
    described = {}
    for status, named in sorted(answers.items()):
        headers = {name for response in named.values() for name in response.headers}
        always = {name: all(name in response.headers for response in named.values()) for name in headers}
        content = {name: response.content for name, response in named.items()}
        described[str(status)] = _response(HTTPStatus(status), always)
        described[str(status)] |= _content(_reference("schemas", ErrorEnvelope.__name__), content)
    return described


def _response(status: HTTPStatus, headers: Mapping[str, bool]) -> dict[str, Any]:
    always = {"X-Request-Id": True, **headers}
    return {
        "description": status.phrase,
        "headers": {name: _HEADERS[name] | {"required": always[name]} for name in sorted(always)},
    }


def _content(schema: dict[str, Any], examples: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": {MediaType.JSON: {"schema": schema, "examples": _named(examples)}}}


def _named(examples: Mapping[str, Any]) -> dict[str, Any]:
    values = msgspec.to_builtins(dict(examples))
    for value in values.values():
        if "meta" in value:
            value["meta"]["timestamp"] = "2026-03-02T09:30:00.123456+00:00"
    return {name: {"value": value} for name, value in values.items()}


def _schemas(every: list[Operation]) -> dict[str, Any]:
    bodies = [operation.body for operation in every if operation.body]
    payloads = [Envelope[type(operation.example)] for operation in every]  # type: ignore[misc]
    _, schemas = _generate(*bodies, *payloads, ErrorEnvelope)
    for schema in schemas.values():
        # Docstrings tell developers the source; readers of the document do not have it.
        schema["description"] = re.sub(r" \(interface, .*?\)", "", schema["description"])
        for name, field in schema.get("properties", {}).items():
            if name in _DESCRIPTIONS:
                field["description"] = _DESCRIPTIONS[name]
    form = schemas[CreateBody.__name__]
    form |= _WAIVER_RULE
    form["properties"]["meta_data"] |= _META_DATA
    schemas["JsonValue"] = _JSON_VALUE
    return schemas


def _generate(*types: object) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    return msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")


def _reference(kind: str, name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/{kind}/{name}"}
