"""Finds out what a message is about, for log lines and records, whether or not it can be decoded."""

import re
from typing import Any

import msgspec

from service import json_faults
from service.identifiers import parse_uuid
from service.telemetry import tracing

_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Topic(msgspec.Struct, frozen=True):
    """What a message is about: its request, its calculation and its trace, as far as they are well-formed."""

    uuid: str | None = None
    calculation_id: str | None = None
    traceparent: str | None = None


class _Outline(msgspec.Struct):
    specversion: Any = None  # only CloudEvents have it
    traceparent: Any = None
    subject: Any = None
    data: Any = None
    request_uuid: Any = None
    calculation_id: Any = None


def topic_of(body: bytes) -> Topic:
    """Return what a message is about, however malformed it is. Its sender may be another team."""
    try:
        outline = msgspec.json.decode(body, type=_Outline)
    except json_faults.UNREADABLE:
        return Topic()
    data = outline.data if isinstance(outline.data, dict) else {}
    result = outline.request_uuid if outline.specversion is None else data.get("request_uuid")
    calculation_id = outline.calculation_id if outline.specversion is None else data.get("calculation_id")
    # A result is recorded for the first; the others are for messages that are malformed or of other kinds.
    named = (result, data.get("request_uuid"), data.get("uuid"), outline.subject)
    uuid = next((name for name in named if isinstance(name, str) and parse_uuid(name)), None)
    return Topic(uuid, safe_id(calculation_id), tracing.accept(outline.traceparent))


def safe_id(value: object) -> str | None:
    """Return an id if it is fit for a log line: other teams choose theirs freely."""
    return value if isinstance(value, str) and _SAFE_ID.fullmatch(value) else None
