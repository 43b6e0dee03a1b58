"""No change of the events breaks consumers or senders who built on the released document.

`released_asyncapi.json` is deploy/asyncapi.json as the last release had it: each release copies it.

Every message that one side may write must be acceptable to the other: what we send by today's document, to
consumers who know the released one; what others send by the released document, to us. Messages are tried as
in their examples, and with each value, type, bound and absence that their schemas name.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema_rs import Draft202012Validator

from service.contracts import asyncapi
from service.outbox import events

TODAY: dict[str, Any] = msgspec.to_builtins(asyncapi.document())
RELEASED = msgspec.json.decode((Path(__file__).parent / "released_asyncapi.json").read_bytes())
OF_EACH_TYPE = {"null": None, "boolean": True, "integer": 17, "string": "text"}
Json = dict[str, Any]
GONE = object()


def breaks(old: Json, new: Json) -> list[str]:
    """Return what in *new* breaks consumers or senders who built on *old*."""
    found = [
        f"channel {name}: {fact} changed"
        for name, channel in old["channels"].items()
        for fact in ("address", "bindings")
        if new["channels"].get(name, {}).get(fact) != channel[fact]
    ]
    for name, operation in old["operations"].items():
        now = new["operations"].get(name, {})
        before, after = names_of_messages(operation), names_of_messages(now)
        if any(now.get(fact) != operation[fact] for fact in ("action", "channel")) or before - after:
            found.append(f"{name}: it, its channel or a message of it is gone")
        elif operation["action"] == "send" and after - before:
            found.append(f"{name}: readers of its channel do not know {after - before}")
        for message in before & after:
            sender, reader = (new, old) if operation["action"] == "send" else (old, new)
            found += [f"{name}: {fault}" for fault in faults(message, sender=sender, reader=reader)]
            lost = fields(old, described(old, message)) - fields(new, described(new, message))
            found += [f"{name}: {field} is gone" for field in lost]
    return found


def names_of_messages(operation: Json) -> set[str]:
    return {reference["$ref"].rpartition("/")[2] for reference in operation.get("messages", ())}


def described(document: Json, message: str) -> Json:
    """Return the schema of a message, with its headers."""
    facts = document["components"]["messages"][message]
    content_type = {"const": facts["contentType"]}
    parts = {"contentType": content_type, "headers": facts.get("headers", {}), "payload": facts["payload"]}
    return {"properties": parts, "required": [*parts], "components": document["components"]}


def faults(message: str, *, sender: Json, reader: Json) -> Iterator[str]:
    """Yield why *reader* cannot read what *sender* may send."""
    facts = sender["components"]["messages"][message]
    example = {"headers": {}, "contentType": facts["contentType"], **facts["examples"][0]}
    for document in (sender, reader):
        judge = Draft202012Validator(described(document, message), validate_formats=True)
        for sent in variants(sender, described(sender, message), example):
            yield from (f"{error.instance_path} {error.message}" for error in judge.iter_errors(sent))


def variants(document: Json, schema: Json, example: Any) -> Iterator[Any]:
    """Yield *example*, and variants of it that differ in one respect that the schema names."""
    schema = resolved(document, schema)
    yield example
    yield from schema.get("enum", ())
    for choice in schema.get("anyOf", ()):
        yield from variants(document, choice, OF_EACH_TYPE[choice["type"]])
    if "minimum" in schema:
        yield schema["minimum"]
    if "maxLength" in schema:
        yield "x" * schema["maxLength"]
    if "properties" in schema and schema.get("additionalProperties", True):
        yield {**example, "added by the sender": True}
    for name, field in schema.get("properties", {}).items():
        if name not in schema["required"]:
            yield {other: value for other, value in example.items() if other != name}
        if name in example:
            yield from ({**example, name: value} for value in variants(document, field, example[name]))


def fields(document: Json, schema: Json, path: str = "") -> set[str]:
    """Return the path of every field that a schema names."""
    found = set()
    for name, field in resolved(document, schema).get("properties", {}).items():
        found |= {f"{path}/{name}", *fields(document, field, f"{path}/{name}")}
    return found


def resolved(document: Json, schema: Json) -> Any:
    """Return what a reference refers to; anything else as it is."""
    if "$ref" not in schema:
        return schema
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def test_events_do_not_break_who_built_on_the_released_ones():
    assert breaks(RELEASED, TODAY) == []


SENT = "components/schemas/RequestCalculated"  # sent, and not read by this service
BOTH_WAYS = "components/schemas/RequestCreated"  # sent, and read by this service from "notifications"
RECEIVED = "components/schemas/CalculationCreated"
NUMBER = {"type": "integer"}


def changed(path: str, value: object) -> Json:
    """Return today's document with *value* at this path, or with nothing there if it is GONE."""
    document = copy.deepcopy(TODAY)
    *steps, last = path.split("/")
    part = document
    for step in steps:
        part = part[step]
    part[last] = value
    if value is GONE:
        del part[last]
    return document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{SENT}/properties/external_id", GONE),
        (f"{SENT}/properties/uuid", NUMBER),
        (f"{SENT}/properties/sequence/minimum", 0),
        (f"{SENT}/required", ["uuid"]),
        ("components/schemas/RequestEmailFailed/properties/reason/enum", ["refused", "another"]),
        (f"{BOTH_WAYS}/required", ["added"]),
        (f"{BOTH_WAYS}/properties/property_value", NUMBER),
        (f"{RECEIVED}/properties/calculation_id", GONE),
        (f"{RECEIVED}/required", ["request_uuid", "calculation_id", "added"]),
        (f"{RECEIVED}/properties/request_uuid/pattern", "^uuid_"),
        (f"{RECEIVED}/properties/calculation_id/maxLength", 26),
        (f"{RECEIVED}/additionalProperties", False),
        ("channels/request.created/address", "request.made"),
        ("channels/notifications/bindings/amqp/x-queue-type", "classic"),
        ("operations/send_request_calculated", GONE),
        ("operations/send_request_created/action", "receive"),
        ("operations/receive_calculation_created/messages", []),
        ("operations/send_request_created/messages", [{"$ref": f"/{each}"} for each in events.EVENT_TYPES]),
        ("components/messages/request.created/contentType", "application/json"),
        ("components/messages/calculation.created/headers", {"required": ["id"]}),
    ],
)
def test_breaking_change_is_found(path, value):
    assert breaks(TODAY, changed(path, value)) != []
