"""The examples in the OpenAPI document: bodies, answers, and what is rejected."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from service.api.bodies import CreateBody
from service.api.decoding import Sent
from service.api.listing import CalculationRequestPage
from service.calculation_requests.event_history import CalculationRequestEvents, EventPage
from service.calculation_requests.model import FOR_CUSTOMER, CalculationRequestView
from service.outbox import asyncapi
from service.outbox.events import RequestErased

UUID = "req_01a9ZkW3mT6qPxB8vNcR4d"
_SECRET = "3q2-7wAAbmV2ZXIgYSByZWFsIHNlY3JldCBoZXJlISE"  # noqa: S105 - an example


def bodies_of(kind: type[Sent]) -> dict[str, dict[str, Any]]:
    """Return bodies of a type, by the names of the examples. They are made of the examples of its fields."""
    full = asyncapi.examples_in(kind)
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    smallest = {"smallest": {name: full[name] for name in required}} if required else {}
    return {**smallest, "full": full}


SMALLEST_REQUEST, FULL_REQUEST = bodies_of(CreateBody).values()
AFTER = "6a0b1f2c3d4e5f60000000010000000000000f3a019a43d6c8b17e0f9a2b4c6d8e0f1a2b00000003"

RECORD = CalculationRequestView(
    **FULL_REQUEST,
    uuid=UUID,
    created_at=datetime(2026, 3, 2, 9, 30, tzinfo=UTC),
    updated_at=datetime(2026, 3, 2, 9, 30, tzinfo=UTC),
    calculation_id=None,
    secret=_SECRET,
    request_url=f"https://app.example.com/calculator/request/{UUID}?secret={_SECRET}",
)

LISTED = {"ok": CalculationRequestPage([RECORD], UUID)}
RETRIEVED = {
    "ok": RECORD,
    "by_secret": replace(RECORD, **{name: None for name in FULL_REQUEST if name not in FOR_CUSTOMER}),
    "internal_reader": replace(RECORD, secret=None, request_url=None),
}
_HISTORY = [asyncapi.example_of(each) for each in asyncapi.SENT_EXAMPLES if type(each) is not RequestErased]
EVENTS = {"ok": CalculationRequestEvents(_HISTORY)}
FEED = {"ok": EventPage(_HISTORY, AFTER, more=False)}
