"""Decodes the JSON of a message once, for both its handler and its log lines."""

import re
from typing import Any, TypeVar

import msgspec

from service import json_faults
from service.identifiers import parse_uuid
from service.telemetry import tracing

_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Kind = TypeVar("Kind")


class Malformed(Exception):
    """The message is not valid for this queue."""

    def __init__(self, reason: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {reason}" if field else reason)


class Incoming(msgspec.Struct, frozen=True):
    """The JSON of a message, and the ids in it that are well-formed."""

    json: Any  # None if the body cannot be read. Then *fault* is the reason.
    fault: str = ""
    is_event: bool = False  # a CloudEvent
    uuid: str | None = None
    calculation_id: str | None = None
    traceparent: str | None = None

    def to(self, kind: type[Kind]) -> Kind:
        """Convert the JSON. Raises Malformed, which names the faulty field but quotes no value."""
        if self.fault:
            raise Malformed(f"not readable JSON: {self.fault}")
        try:
            return msgspec.convert(self.json, kind)
        except msgspec.ValidationError as error:
            raise Malformed(json_faults.describe(error)) from None


def read(body: bytes) -> Incoming:
    """Read a message, even if it is malformed, because its sender may be another team."""
    try:
        json = msgspec.json.decode(body)
    except json_faults.UNREADABLE as error:
        return Incoming(None, json_faults.why_unreadable(body, error))
    outer = json if isinstance(json, dict) else {}
    is_event = "specversion" in outer
    data = outer.get("data") if is_event else outer
    inner = data if isinstance(data, dict) else {}
    names = (inner.get("request_uuid"), inner.get("uuid"), outer.get("subject"))
    return Incoming(
        json,
        is_event=is_event,
        uuid=next((name for name in names if isinstance(name, str) and parse_uuid(name)), None),
        calculation_id=safe_id(inner.get("calculation_id")),
        traceparent=tracing.accept(outer.get("traceparent")),
    )


def safe_id(value: object) -> str | None:
    """Return *value* if it is an id that is safe to log. Other teams may choose any id."""
    return value if isinstance(value, str) and _SAFE_ID.fullmatch(value) else None
