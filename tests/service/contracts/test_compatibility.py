"""Which changes of the events are compatible, and which break consumers or senders."""

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from service.contracts import asyncapi
from service.contracts.compatibility import breaks, unreadable

DOCUMENT: dict[str, Any] = msgspec.to_builtins(asyncapi.document())
Change = Callable[[dict[str, Any]], object]


def changed(change: Change, *, name: str | None = None) -> dict[str, Any]:
    """Return the document after *change* of it, or of the schema called *name*."""
    document = copy.deepcopy(DOCUMENT)
    change(document if name is None else document["components"]["schemas"][name])
    return document


def at(*path: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that returns the part of a document at this path."""

    def find(document: dict[str, Any]) -> dict[str, Any]:
        for step in path:
            document = document[step]
        return document

    return find


def put(field: str, schema: Any, *, required: bool | None = None) -> Change:
    """Return a change that adds a field to an object, or replaces the schema of a field."""

    def change(described: dict[str, Any]) -> None:
        described["properties"][field] = schema
        if required is not None:
            described["required"] = [name for name in described["required"] if name != field]
        if required:
            described["required"].append(field)

    return change


def drop(field: str) -> Change:
    """Return a change that removes a field from an object."""

    def change(described: dict[str, Any]) -> None:
        del described["properties"][field]
        described["required"] = [name for name in described["required"] if name != field]

    return change


def rename(old: str, new: str) -> Change:
    """Return a change that renames a field."""

    def change(described: dict[str, Any]) -> None:
        schema = described["properties"][old]
        is_required = old in described["required"]
        drop(old)(described)
        put(new, schema, required=is_required)(described)

    return change


def test_unchanged_document_breaks_nothing() -> None:
    assert breaks(DOCUMENT, DOCUMENT) == []


EXCHANGE_OF_RESULTS = at("channels", "calculation.created", "bindings", "amqp", "exchange")
HEADERS = at("components", "messages", "request.created", "headers", "properties")
TEXT = {"type": "string"}
NUMBER = {"type": "integer"}

SENT = "RequestCalculated"  # sent, and not read by this service
BOTH_WAYS = "RequestCreated"  # sent, and read by this service from its queue "notifications"
RECEIVED = "CalculationCreated"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (SENT, put("added", TEXT, required=True)),
        (SENT, put("added", TEXT, required=False)),
        (BOTH_WAYS, put("added", TEXT, required=False)),
        (SENT, put("property_value", NUMBER)),  # no longer null
        (SENT, put("request_type", {"const": "SDLT_CALCULATION"})),
        (SENT, put("request_type", {**TEXT, "maxLength": 100})),
        (SENT, put("sequence", {**NUMBER, "minimum": 2})),
        (SENT, put("uuid", {**TEXT, "pattern": "^req_"})),
        (SENT, put("uuid", {**TEXT, "description": "Only explained.", "title": "The request"})),
        (RECEIVED, put("added", TEXT, required=False)),
        (RECEIVED, put("request_uuid", TEXT, required=False)),
        (RECEIVED, put("request_uuid", {"anyOf": [TEXT, {"type": "null"}]})),
        (RECEIVED, put("calculation_id", TEXT)),
        (RECEIVED, put("calculation_id", {"type": ["string", "integer"]})),
    ],
)
def test_compatible_change_is_accepted(name: str, change: Change) -> None:
    assert breaks(DOCUMENT, changed(change, name=name)) == []


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (SENT, drop("external_id"), ".external_id: removed"),
        (SENT, rename("tenant", "conveyancer"), ".tenant: removed"),
        (SENT, put("uuid", NUMBER), "integer instead of string"),
        (SENT, put("calculation_fee_exempt", TEXT), "string instead of boolean"),
        (SENT, put("uuid", {"anyOf": [TEXT, {"type": "null"}]}), "null instead of string"),
        (SENT, put("uuid", {}), "any type instead of string"),
        (SENT, put("uuid", TEXT, required=False), ".uuid: may be missing"),
        (SENT, put("sequence", NUMBER), "may violate minimum 1"),
        (SENT, put("sequence", {**NUMBER, "minimum": 0}), "may violate minimum 1"),
        (BOTH_WAYS, put("added", TEXT, required=True), "read_notifications"),
        (BOTH_WAYS, put("property_value", NUMBER), "read_notifications"),
        (RECEIVED, drop("calculation_id"), ".calculation_id: removed"),
        (RECEIVED, rename("request_uuid", "uuid"), ".uuid: may be missing"),
        (RECEIVED, put("added", TEXT, required=True), ".added: may be missing"),
        (RECEIVED, put("request_uuid", NUMBER), "string instead of integer"),
        (RECEIVED, put("request_uuid", {**TEXT, "maxLength": 26}), "may violate maxLength 26"),
        (RECEIVED, put("request_uuid", {**TEXT, "pattern": "^req_"}), "may violate pattern '^req_'"),
        (RECEIVED, put("request_uuid", {**TEXT, "format": "uuid"}), "may violate format 'uuid'"),
        (RECEIVED, put("request_uuid", {"enum": ["req_1"]}), "not only"),
        (RECEIVED, lambda schema: schema.update(additionalProperties=False), "additionalProperties"),
    ],
)
def test_breaking_change_is_refused(name: str, change: Change, problem: str) -> None:
    found = breaks(DOCUMENT, changed(change, name=name))

    assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda document: document["channels"].pop("request.calculated"), "request.calculated: removed"),
        (
            lambda document: document["channels"]["request.created"].update(address="request.made"),
            "request.created: address changed",
        ),
        (
            lambda document: document["channels"]["calculation.created"]["bindings"]["amqp"][
                "exchange"
            ].update(name="results"),
            "calculation.created: bindings changed",
        ),
        (
            lambda document: document["channels"]["notifications"]["bindings"]["amqp"].update(
                {"x-queue-type": "classic"}
            ),
            "notifications: bindings changed",
        ),
        (lambda document: document["operations"].pop("send_request_calculated"), "removed"),
        (
            lambda document: document["operations"]["send_request_created"].update(action="receive"),
            "moved to another action",
        ),
        (
            lambda document: document["operations"]["receive_calculation_created"]["messages"].pop(),
            "calculation.created.bare removed",
        ),
        (
            lambda document: document["operations"]["send_request_created"]["messages"].append(
                {"$ref": "#/channels/request.created/messages/request.calculated"}
            ),
            "existing readers of this channel do not know",
        ),
        (
            lambda document: document["components"]["messages"]["request.created"].update(
                contentType="application/json"
            ),
            "not only ['application/cloudevents+json']",
        ),
        (
            lambda document: document["components"]["messages"]["request.created"]["headers"][
                "properties"
            ].pop("traceparent"),
            "headers.traceparent: removed",
        ),
        (
            lambda document: document["components"]["messages"]["calculation.created"].update(
                headers={"required": ["cloudEvents:id"]}
            ),
            "cloudEvents:id: may be missing",
        ),
    ],
)
def test_breaking_change_of_channels_and_messages_is_refused(change: Change, problem: str) -> None:
    found = breaks(DOCUMENT, changed(change))

    assert any(problem in line for line in found), found


def test_new_event_breaks_nothing() -> None:
    def add(document: dict[str, Any]) -> None:
        for part in ("channels", "operations"):
            text = (
                msgspec.json.encode(document[part]).decode().replace("request.calculated", "request.closed")
            )
            added = msgspec.json.decode(text.replace("request_calculated", "request_closed"))
            document[part] = {**document[part], **added}
        messages = document["components"]["messages"]
        messages["request.closed"] = messages["request.calculated"]

    assert breaks(DOCUMENT, changed(add)) == []


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ({"enum": ["a"]}, {"enum": ["a", "b"]}),
        ({"const": "a"}, {"enum": ["a", "b"]}),
        ({"enum": ["a", "b"]}, TEXT),
        (NUMBER, {"type": "number"}),
        (NUMBER, {"anyOf": [TEXT, NUMBER]}),
        ({**TEXT, "maxLength": 3}, {**TEXT, "maxLength": 4}),
        ({"type": "array", "items": NUMBER}, {"type": "array"}),
        ({"type": "array", "items": {"const": 1}}, {"type": "array", "items": NUMBER}),
        ({"type": "object", "additionalProperties": False}, {"type": "object"}),
        (
            {"properties": {"a": TEXT}, "additionalProperties": False},
            {"properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False},
        ),
    ],
)
def test_narrower_schema_is_readable_by_the_wider_one_only(
    narrow: dict[str, Any], wide: dict[str, Any]
) -> None:
    assert list(unreadable(narrow, wide, at="")) == []
    assert list(unreadable(wide, narrow, at="")) != []
