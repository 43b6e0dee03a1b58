"""The AsyncAPI document: the events and exchanges, generated from the types in the code."""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from typing import Any

import msgspec

from service.identifiers import parse_uuid
from service.outbox import events
from service.outbox.events import CalculationCreated, CloudEvent, RequestEvent

BARE = f"{CalculationCreated.type}.bare"  # calculation.created without its envelope

_ABOUT = """\
What happens to requests for Stamp Duty Land Tax calculations, and how to announce a calculation.

Delivery is at least once, and in order within a request. Deduplicate events by `id`, and detect missing ones
by `sequence`. Bind a queue of your own to the exchange. Events carry no personal data: for more, call the
API. New fields may be added: ignore fields that you do not know. Breaking changes come as new event types."""

_AMQP = {"bindingVersion": "0.3.0"}
_SCHEMAS = "#/components/schemas/"
EXAMPLE_TIME = datetime(2026, 3, 2, 9, 30, tzinfo=UTC)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def examples_in(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the example of each field that has one, as in JSON."""
    fields = msgspec.json.schema_components([kind])[1][kind.__name__]["properties"]
    return {name: field["examples"][0] for name, field in fields.items() if "examples" in field}


SENT_EXAMPLES = tuple(
    msgspec.convert(examples_in(event) | {"sequence": sequence}, event)
    for sequence, event in enumerate(events.SENT, 1)
)
_CALCULATION = msgspec.convert(examples_in(CalculationCreated), CalculationCreated)
RECEIVED_EXAMPLES: dict[str, Any] = {
    CalculationCreated.type: CloudEvent(
        specversion=events.SPECVERSION,
        id="2f1c0c5e-3d0b-4b51-9a53-7d1f1a0f6a55",
        source="/calculations",
        type=CalculationCreated.type,
        time=EXAMPLE_TIME,
        datacontenttype=events.DATA_CONTENT_TYPE,
        traceparent=TRACEPARENT,
        data=_CALCULATION,
    ),
    BARE: _CALCULATION,
}


def example_of(event: RequestEvent, *, traceparent: str | None = None) -> CloudEvent[RequestEvent]:
    """Return an example of an event in its envelope."""
    row = {"request_id": parse_uuid(event.uuid), "sequence": event.sequence, "type": event.type}
    enveloped = events.in_envelope({**row, "time": EXAMPLE_TIME, "data": b""}, traceparent)
    return msgspec.structs.replace(enveloped, data=event)


# Each type of event: what the service does with its messages, their exchange, and their names.
_TYPES: list[tuple[type[RequestEvent | CalculationCreated], str, str, list[str]]] = [
    *((event, "send", events.EXCHANGE, [event.type]) for event in events.SENT),
    (CalculationCreated, "receive", events.CALCULATIONS_EXCHANGE, [*RECEIVED_EXAMPLES]),
]


@cache
def document() -> dict[str, Any]:
    """Return the AsyncAPI 3.0 document. In it, "send" means that this service sends."""
    schemas = sent_schemas() | generate(CloudEvent[CalculationCreated], CalculationCreated)
    schemas[schema_name(CalculationCreated)]["properties"]["type"] = {"const": CalculationCreated.type}
    channels, operations = {}, {}
    for event, action, exchange, messages in _TYPES:
        described = {"name": exchange, "type": "topic", "durable": True, "autoDelete": False}
        channels[event.type] = {
            "address": event.type,
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
            "bindings": {"amqp": {"is": "routingKey", "exchange": described, **_AMQP}},
        }
        operations[f"{action}_{event.type.replace('.', '_')}"] = {
            "action": action,
            "channel": {"$ref": f"#/channels/{event.type}"},
            "summary": event.__doc__,
            "messages": [{"$ref": f"#/channels/{event.type}/messages/{name}"} for name in messages],
            "bindings": {"amqp": {"deliveryMode": 2, **_AMQP}},
        }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Calculation requests", "version": "1", "description": _ABOUT},
        "defaultContentType": events.CONTENT_TYPE,
        "channels": channels,
        "operations": operations,
        "components": {"messages": {message["name"]: message for message in _messages()}, "schemas": schemas},
    }


def _messages() -> Iterator[dict[str, Any]]:
    """Describe all messages. Those that the service accepts need no headers."""
    for event in SENT_EXAMPLES:
        enveloped = example_of(event, traceparent=TRACEPARENT)
        payload = msgspec.to_builtins(enveloped)
        message = _message(event.type, type(event).__doc__, schema_name(type(event)), payload)
        headers = events.headers(enveloped.id, event.type, event.sequence, TRACEPARENT)
        message["examples"][0]["headers"] = headers
        kinds = {name: "integer" if isinstance(value, int) else "string" for name, value in headers.items()}
        yield {
            **message,
            "headers": {
                "type": "object",
                "properties": {name: {"type": kind} for name, kind in kinds.items()},
                "required": [name for name in headers if name != "traceparent"],
            },
        }
    (name, enveloped), (bare_name, bare) = msgspec.to_builtins(RECEIVED_EXAMPLES).items()
    about = "In the CloudEvents envelope. The member `data_base64` may replace `data`."
    yield _message(name, about, schema_name(CalculationCreated), enveloped)
    yield _message(bare_name, "Without the CloudEvents envelope.", CalculationCreated.__name__, bare)


def _message(name: str, summary: str | None, schema: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "summary": summary,
        "contentType": events.DATA_CONTENT_TYPE if name == BARE else events.CONTENT_TYPE,
        "payload": {"$ref": _SCHEMAS + schema},
        "bindings": {"amqp": {"messageType": name.removesuffix(".bare"), **_AMQP}},
        "examples": [{"name": name, "payload": payload}],
    }


def schema_name(event: type[RequestEvent | CalculationCreated]) -> str:
    """Return the name of the schema of an event in its envelope."""
    return f"CloudEvent_{event.__name__}_"


def sent_schemas() -> dict[str, Any]:
    """Return the schemas of the events that the service sends, in their envelopes, and of their data."""
    schemas = generate(*(CloudEvent[event] for event in events.SENT))  # type: ignore[valid-type]
    text = {"type": "string"}
    for event in events.SENT:
        envelope = schemas[schema_name(event)]
        # The envelope's type describes what we accept. These properties describe what we send.
        envelope["properties"] |= {
            "specversion": {"const": events.SPECVERSION},
            "source": {"const": events.SOURCE},
            "type": {"const": event.type},
            "subject": text,
            "time": {**text, "format": "date-time"},
            "datacontenttype": {"const": events.DATA_CONTENT_TYPE},
            "traceparent": text,
        }
        envelope["required"] = [name for name in envelope["properties"] if name != "traceparent"]
    return schemas


def generate(*types: object) -> dict[str, Any]:
    """Return the schemas of *types*, and of the types in them, by name."""
    schemas = msgspec.json.schema_components(types, ref_template=_SCHEMAS + "{name}")[1]
    for schema in schemas.values():  # Generators name classes by the title: "CloudEvent[…]" would be odd.
        schema["title"] = schema["title"].replace("CloudEvent[", "CloudEventOf").rstrip("]")
    return schemas
