"""Finds out which request a message is about, for the log lines, before the message is decoded."""

from typing import Any

import msgspec

from service import json_faults
from service.identifiers import parse_uuid
from service.telemetry import trace_context


class Topic(msgspec.Struct, frozen=True):
    """What a message is about: the uuid of its request and its trace, as far as they are well-formed."""

    uuid: str | None = None
    traceparent: str | None = None


class _Outline(msgspec.Struct):
    specversion: Any = None  # only CloudEvents have it
    traceparent: Any = None
    subject: Any = None
    data: Any = None
    request_uuid: Any = None


def topic_of(body: bytes) -> Topic:
    """Return what a message is about, however malformed it is. Its sender may be another team."""
    try:
        outline = msgspec.json.decode(body, type=_Outline)
    except json_faults.UNREADABLE:
        return Topic()
    data = outline.data if isinstance(outline.data, dict) else {}
    result = outline.request_uuid if outline.specversion is None else data.get("request_uuid")
    # A result is recorded for the first; the others are for messages that are malformed or of other kinds.
    named = (result, data.get("request_uuid"), data.get("uuid"), outline.subject)
    uuid = next((name for name in named if isinstance(name, str) and parse_uuid(name)), None)
    return Topic(uuid, trace_context.accept(outline.traceparent))
