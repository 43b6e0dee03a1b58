"""The schemas of the OpenAPI document, as msgspec makes them: Litestar's own lack constraints."""

import inspect
from typing import Any

from service.api.bodies import TEXT, CreateBody
from service.api.envelope import Envelope, ErrorEnvelope, FieldError
from service.api.listing import CalculationRequestPage
from service.api.questionnaire import QuestionnaireStructure
from service.calculation_requests.event_history import CalculationRequestEvents
from service.calculation_requests.field_docs import REASON_CHARACTERS
from service.calculation_requests.model import CalculationRequestView, RetrievedCalculationRequest
from service.outbox import asyncapi, events
from service.outbox.events import RequestEvent

_PAYLOADS = (
    Envelope[CalculationRequestView],
    Envelope[CalculationRequestPage],
    Envelope[RetrievedCalculationRequest],
    Envelope[CalculationRequestEvents],
    Envelope[QuestionnaireStructure],
)

# The reason of a waiver is checked only if the fee is to be waived.
_REASON = {"type": "string", "minLength": 1, "maxLength": REASON_CHARACTERS, **TEXT}
_WITH_REASON = {
    "properties": {"calculation_fee_exempt_reason": _REASON},
    "required": ["calculation_fee_exempt_reason"],
}
_WITHOUT_WAIVER = {"properties": {"calculation_fee_exempt": {"const": False}}}
_WAIVER_RULE = {"dependentSchemas": {"calculation_fee_exempt": {"anyOf": [_WITHOUT_WAIVER, _WITH_REASON]}}}


def generate() -> dict[str, Any]:
    """Return the schemas of the OpenAPI document by name, with all that the types say of their fields."""
    schemas = asyncapi.generate(CreateBody, *_PAYLOADS, ErrorEnvelope)
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
            "data": _reference(RequestEvent.__name__),
        },
    }
    schemas[CalculationRequestEvents.__name__]["properties"]["events"]["items"] = {
        "anyOf": [_reference(name) for name in (*names, other)]
    }


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
