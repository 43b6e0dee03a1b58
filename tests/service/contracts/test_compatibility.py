"""No change of the events breaks consumers or senders who built on the released document.

`released_asyncapi.json` is deploy/asyncapi.json as the last release had it: each release copies it.

Every message that one side may write must be acceptable to the other: what we send by today's document, to
consumers who know the released one; what others send by the released document, to us. Messages are tried as
in their examples, and with each value, type, bound and absence that their schemas name.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema_rs import Draft202012Validator

from service.contracts import asyncapi

TODAY: dict[str, Any] = msgspec.to_builtins(asyncapi.document())
RELEASED = msgspec.json.decode((Path(__file__).parent / "released_asyncapi.json").read_bytes())
OF_EACH_TYPE = {"null": None, "boolean": True, "integer": 17, "string": "text"}
Json = dict[str, Any]
Change = Callable[[Json], object]


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


def resolved(document: Json, schema: Json) -> Json:
    """Return what a reference refers to; anything else as it is."""
    if "$ref" not in schema:
        return schema
    target: Json = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return target


def test_events_do_not_break_who_built_on_the_released_ones() -> None:
    assert breaks(RELEASED, TODAY) == []


SENT = "RequestCalculated"  # sent, and not read by this service
BOTH_WAYS = "RequestCreated"  # sent, and read by this service from its queue "notifications"
RECEIVED = "CalculationCreated"
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TEXT_OR_NULL = {"anyOf": [TEXT, {"type": "null"}]}


def put(name: str, field: str, schema: Json, *, required: bool = True) -> Change:
    """Return a change of one field of the schema with this name."""

    def change(document: Json) -> None:
        described = document["components"]["schemas"][name]
        described["properties"][field] = schema
        described["required"] = [*({*described["required"]} - {field}), *([field] if required else [])]

    return change


def drop(*path: str) -> Change:
    """Return a change that removes what is at this path, and does not require it any more."""

    def change(document: Json) -> None:
        part, above = document, document
        for step in path[:-1]:
            part, above = part[step], part
        del part[path[-1]]
        if "required" in above:
            above["required"] = [name for name in above["required"] if name != path[-1]]

    return change


def set_at(*path: str, to: Any) -> Change:
    """Return a change that sets what is at this path."""

    def change(document: Json) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = to

    return change


def after(change: Change) -> Json:
    """Return today's document after *change*."""
    document = copy.deepcopy(TODAY)
    change(document)
    return document


@pytest.mark.parametrize(
    "change",
    [
        put(SENT, "added", TEXT, required=False),
        put(BOTH_WAYS, "added", TEXT, required=False),
        put(SENT, "property_value", NUMBER),  # no longer null
        put(SENT, "request_type", {"const": "SDLT_CALCULATION"}),
        put(SENT, "sequence", {**NUMBER, "minimum": 2}),
        put(RECEIVED, "added", TEXT, required=False),
        put(RECEIVED, "request_uuid", TEXT, required=False),
        put(RECEIVED, "request_uuid", TEXT_OR_NULL),
        put(RECEIVED, "calculation_id", TEXT),
        set_at("channels", "another", to={"address": "another"}),
        set_at("operations", "another", to={"action": "send", "messages": []}),
    ],
)
def test_compatible_change_is_accepted(change: Change) -> None:
    assert breaks(TODAY, after(change)) == []


OF_CREATED = ("components", "messages", "request.created")


@pytest.mark.parametrize(
    "change",
    [
        drop("components", "schemas", SENT, "properties", "external_id"),
        put(SENT, "uuid", NUMBER),
        put(SENT, "uuid", TEXT_OR_NULL),
        put(SENT, "uuid", TEXT, required=False),
        put(SENT, "sequence", {**NUMBER, "minimum": 0}),
        put("RequestEmailFailed", "reason", {"enum": ["refused", "gave_up", "another"]}),
        put(BOTH_WAYS, "added", TEXT),
        put(BOTH_WAYS, "property_value", NUMBER),
        drop("components", "schemas", RECEIVED, "properties", "calculation_id"),
        put(RECEIVED, "added", TEXT),
        put(RECEIVED, "request_uuid", NUMBER),
        put(RECEIVED, "request_uuid", {**TEXT, "pattern": "^uuid_"}),
        put(RECEIVED, "calculation_id", {**TEXT, "maxLength": 26}),
        set_at("components", "schemas", RECEIVED, "additionalProperties", to=False),
        drop("channels", "request.calculated"),
        set_at("channels", "request.created", "address", to="request.made"),
        set_at("channels", "notifications", "bindings", "amqp", "x-queue-type", to="classic"),
        drop("operations", "send_request_calculated"),
        set_at("operations", "send_request_created", "action", to="receive"),
        set_at("operations", "receive_calculation_created", "messages", to=[]),
        set_at(
            "operations",
            "send_request_created",
            "messages",
            to=[{"$ref": f"/{name}"} for name in ("request.created", "request.calculated")],
        ),
        set_at(*OF_CREATED, "contentType", to="application/json"),
        drop(*OF_CREATED, "headers", "properties", "traceparent"),
        set_at("components", "messages", "calculation.created", "headers", to={"required": ["id"]}),
    ],
)
def test_breaking_change_is_found(change: Change) -> None:
    assert breaks(TODAY, after(change)) != []
