"""Reads the JSON of a message, for its handler and its log lines."""

import re
from typing import TypeVar
from uuid import UUID

import msgspec

from service import json_faults
from service.identifiers import parse_uuid
from service.telemetry import tracing

LARGEST_BODY = 16_384  # bytes. Decoded, a body may take thirty times its size.

_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Kind = TypeVar("Kind")


class Malformed(Exception):
    """The message is not valid for this queue."""


class Incoming(msgspec.Struct, frozen=True):
    """A body, and the well-formed ids in it. Its JSON is not kept, because it may be many times as large."""

    body: bytes
    fault: str = ""  # why the body cannot be read
    is_event: bool = False  # a CloudEvent
    uuid: str | None = None
    calculation_id: str | None = None
    traceparent: str | None = None

    def to(self, kind: type[Kind]) -> Kind:
        """Decode the body. Raises Malformed, which names the faulty field but quotes no value."""
        if self.fault:
            raise Malformed(self.fault)
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.ValidationError as error:
            raise Malformed(json_faults.describe(error)) from None


def read(body: bytes) -> Incoming:
    """Read a message, even if it is malformed, because its sender may be another team."""
    if len(body) > LARGEST_BODY:
        return Incoming(body, f"larger than {LARGEST_BODY} bytes")
    try:
        json = msgspec.json.decode(body)
    except json_faults.UNREADABLE as error:
        return Incoming(body, f"not readable JSON: {json_faults.why_unreadable(body, error)}")
    outer = json if isinstance(json, dict) else {}
    is_event = "specversion" in outer
    # SDKs write bytes like this (JSON Event Format for CloudEvents, section 3.1.1), and send no `data` then.
    if is_event and "data_base64" in outer and "data" not in outer:
        try:
            outer["data"] = msgspec.json.decode(msgspec.convert(outer.pop("data_base64"), bytes))
            body = msgspec.json.encode(outer)
        except json_faults.UNREADABLE:
            return Incoming(body, "data_base64: Expected JSON in base64")
    data = outer.get("data") if is_event else outer
    inner = data if isinstance(data, dict) else {}
    names = (inner.get("request_uuid"), inner.get("uuid"), outer.get("subject"))
    return Incoming(
        body,
        is_event=is_event,
        uuid=next((name for name in names if isinstance(name, str) and parse_uuid(name)), None),
        calculation_id=safe_id(inner.get("calculation_id")),
        traceparent=tracing.accept(outer.get("traceparent")),
    )


def request_id_in(uuid: str, field: str) -> UUID:
    """Return the id of a request, from a field of a message. Raises Malformed."""
    request_id = parse_uuid(uuid)
    if request_id is None:
        raise Malformed(f"{field}: Expected the uuid of a request")
    return request_id


def safe_id(value: object) -> str | None:
    """Return *value* if it is an id that is safe to log. Other teams may choose any id."""
    return value if isinstance(value, str) and _SAFE_ID.fullmatch(value) else None
