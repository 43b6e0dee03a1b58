"""The schemas of the OpenAPI document, as msgspec makes them, its queries and headers."""

import inspect
from collections.abc import Collection
from typing import Any

import msgspec

from service.api.bodies import TEXT, CreateBody
from service.api.decoding import Sent
from service.api.envelope import FieldError
from service.api.idempotency_key_header import REPLAYED
from service.calculation_requests.field_docs import REASON_CHARACTERS
from service.outbox import asyncapi, events
from service.outbox.events import RequestCreated, RequestEvent

_SCHEMAS = "#/components/schemas/"
_ANOTHER = "AnotherEvent"

# The reason of a waiver is checked only if the fee is to be waived.
_REASON = {"type": "string", "minLength": 1, "maxLength": REASON_CHARACTERS, **TEXT}
_WITH_REASON = {
    "properties": {"calculation_fee_exempt_reason": _REASON},
    "required": ["calculation_fee_exempt_reason"],
}
_WITHOUT_WAIVER = {"properties": {"calculation_fee_exempt": {"const": False}}}
_WAIVER_RULE = {"dependentSchemas": {"calculation_fee_exempt": {"anyOf": [_WITHOUT_WAIVER, _WITH_REASON]}}}


def generate(*types: object) -> dict[str, Any]:
    """Return the schemas of these types, and of the types in them, by name."""
    schemas = asyncapi.generate(*types)
    _unite_events(schemas)
    for schema in schemas.values():
        schema["description"] = inspect.cleandoc(schema["description"])
        schema.pop("title", None)  # The name of a class, which RapiDoc would show.
        for field in schema.get("properties", {}).values():
            field.pop("default", None)  # openapi-typescript would make the field required.
            if "const" in field or "enum" in field:  # openapi-generator and the page need a type, too.
                field["type"] = "string"
    for event in events.SENT:  # Otherwise RapiDoc would show the component's name.
        schemas[asyncapi.schema_name(event)]["title"] = f"{event.type} event"
    schemas[_ANOTHER]["title"] = "another event"
    schemas[CreateBody.__name__] |= _WAIVER_RULE
    code = schemas[FieldError.__name__]["properties"]["code"]
    # With an enum, generated clients would fail on a code that a later release adds.
    code |= {"type": "string", "examples": code.pop("enum")}
    return {name: _with_null_in_type(schema) for name, schema in schemas.items()}


def _with_null_in_type(schema: Any) -> Any:  # noqa: ANN401 - any part of a schema
    """Write `anyOf` of a type and null as one schema with both types, which generators understand better."""
    match schema:
        case {"type": "null"}:  # From this, openapi-generator crashes or makes code that does not compile.
            return {"type": ["object", "null"], "description": "Always null."}
        case {"anyOf": [{"type": str() as kind, **limits}, {"type": "null"}], **others}:
            return _with_null_in_type({**others, **limits, "type": [kind, "null"]})
        case dict():
            return {name: _with_null_in_type(part) for name, part in schema.items()}
    return schema


def _unite_events(schemas: dict[str, Any]) -> None:
    """Describe each type of event by a schema, and types that come later by that of another event.

    Clients in TypeScript narrow an event by its type if it is `oneOf` schemas, with a discriminator. From
    `anyOf`, openapi-generator makes them an event of the fields that all types have. Without the schema of
    another event, clients in Python and Java would refuse a list with an event of a later type.
    """
    schemas.update(asyncapi.sent_schemas())
    types = {event.type: asyncapi.schema_name(event) for event in events.SENT}
    for name in types.values():
        del schemas[name]["properties"]["traceparent"]
    like = schemas[types[RequestCreated.type]]
    other = {"type": {"type": "string", "not": {"enum": [*types]}}, "data": reference(RequestEvent)}
    schemas[_ANOTHER] = {
        **like,
        "description": "An event of a type that a later release may add: ignore it.",
        "properties": like["properties"] | other,
    }
    references = {event_type: _SCHEMAS + name for event_type, name in types.items()}
    schemas[asyncapi.schema_name(RequestEvent)] = {
        "description": "An event about a request.",
        "oneOf": [{"$ref": each} for each in (*references.values(), _SCHEMAS + _ANOTHER)],
        "discriminator": {"propertyName": "type", "mapping": references},
    }


def reference(kind: object) -> Any:  # noqa: ANN401 - JSON
    """Return a reference to the schema of a type."""
    return msgspec.json.schema_components([kind], ref_template=_SCHEMAS + "{name}")[0][0]


def parameters(query: type[Sent]) -> list[dict[str, Any]]:
    """Return the parameters of a query."""
    described = []
    for name, schema in asyncapi.generate(query)[query.__name__]["properties"].items():
        parameter = {"name": name, "in": "query", "required": False, "description": schema.pop("description")}
        if "examples" in schema:  # Without x-fill-example, RapiDoc would send the example with every call.
            parameter |= {"example": schema.pop("examples")[0], "x-fill-example": "no"}
        described.append(parameter | {"schema": schema})
    return described


def _header(description: str, kind: str = "string") -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


_HEADERS = {
    "Cache-Control": _header("The caller may cache the answer, and must revalidate it each time."),
    "ETag": _header("Changes when the questions change."),
    REPLAYED: _header("`true` if this request was stored earlier, with the same `Idempotency-Key`."),
    "Retry-After": _header("Seconds to wait before the next attempt.", "integer"),
    "WWW-Authenticate": _header("What is wrong with the token (RFC 6750, section 3)."),
    "X-Request-Id": _header("The caller's id, or a new one. Quote it when you report a problem."),
}


def headers(names: Collection[str]) -> dict[str, Any]:
    """Describe the headers of an answer that can have those with these names, in lower case."""
    return {name: _HEADERS[name] for name in _HEADERS if name.lower() in {"x-request-id", *names}}
