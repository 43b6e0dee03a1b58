"""No change of the events breaks consumers or senders who built on the released document.

`released_asyncapi.json` is deploy/asyncapi.json as the last release had it: each release copies it. Today's
document may add fields, messages, channels and operations, and may use other descriptions and examples.
"""

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from service.outbox import asyncapi

TODAY: dict[str, Any] = msgspec.to_builtins(asyncapi.document())
RELEASED = msgspec.json.decode((Path(__file__).parent / "released_asyncapi.json").read_bytes())
GONE = object()
DESCRIPTIVE = {"description", "examples", "info", "summary", "title"}
NAMED = {"channels", "messages", "operations", "properties", "schemas"}  # Their members have names of ours.


def breaks(old: Any, new: Any, path: str = "", *, is_named: bool = False) -> list[str]:
    """Return the paths at which *new* is not *old* with additions."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [path]
    added = set() if is_named else new.keys() - old.keys() - DESCRIPTIVE
    found = [f"{path}/{key}" for key in added]
    for key, part in old.items():
        if is_named or key not in DESCRIPTIVE:
            has_names = key in NAMED and not is_named
            found += breaks(part, new.get(key, GONE), f"{path}/{key}", is_named=has_names)
    return found


def test_events_do_not_break_who_built_on_the_released_ones():
    assert breaks(RELEASED, TODAY) == [], "a new field of an event needs a default"


SENT = "components/schemas/RequestCalculated"
RECEIVED = "components/schemas/CalculationCreated"


def changed(path: str, value: object) -> dict[str, Any]:
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
        (f"{SENT}/properties/uuid/type", "integer"),
        (f"{SENT}/required", ["uuid"]),
        (f"{RECEIVED}/required", ["request_uuid", "calculation_id", "added"]),
        ("channels/request.created/bindings/amqp/exchange/durable", False),
        ("operations/send_request_calculated", GONE),
        ("components/messages/calculation.created/headers", {"required": ["id"]}),
    ],
)
def test_breaking_change_is_found(path, value):
    assert breaks(TODAY, changed(path, value)) == [f"/{path}"]


def test_addition_breaks_nothing():
    assert breaks(TODAY, changed(f"{SENT}/properties/added", {"type": "string"})) == []
