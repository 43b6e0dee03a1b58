"""The messages that every relay here publishes, and their exchange."""

import os
import re
from datetime import UTC, datetime
from typing import Any

AMQP_URL = os.environ["AMQP_URL"]
EXCHANGE = "calculation-requests"
ROUTING_KEY = "request.created"
CONTENT_TYPE = "application/cloudevents+json"

_SUBJECT = re.compile(rb'"subject":"([^"]+)"')


def postgres_url() -> str:
    """Return the URL of the database with the outbox."""
    return os.environ["DATABASE_URL"]


def event_id(payload: bytes) -> str:
    """Return the id of the event in *payload*."""
    found = _SUBJECT.search(payload)
    assert found is not None
    return f"{found[1].decode()}.{ROUTING_KEY}.1"


def headers(id_: str) -> dict[str, Any]:
    """Return the headers of the product's events."""
    return {
        "cloudEvents:specversion": "1.0",
        "cloudEvents:id": id_,
        "cloudEvents:source": "/calculation-requests",
        "cloudEvents:type": ROUTING_KEY,
        "cloudEvents:subject": id_.partition(".")[0],
        "sequence": 1,
    }


def properties(id_: str) -> dict[str, Any]:
    """Return the properties of the product's events, by their names in aio-pika."""
    return {
        "content_type": CONTENT_TYPE,
        "headers": headers(id_),
        "delivery_mode": 2,
        "message_id": id_,
        "timestamp": datetime.now(UTC),
        "type": ROUTING_KEY,
    }
