"""The encoding of events, compared with pamqp's."""

from typing import Any

import pamqp.frame
import pytest
from aiormq import spec
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from service.identifiers import uuid_of
from tests.worker.conftest import TRACEPARENT, outbox_row
from worker.rabbitmq import topology
from worker.relay.amqp_frames import encode_event
from worker.relay.outbox_tables import OutboxRow


def properties_of(event: OutboxRow) -> spec.Basic.Properties:
    headers: dict[str, Any] = {
        "cloudEvents:specversion": "1.0",
        "cloudEvents:id": event.event_id,
        "cloudEvents:source": "/calculation-requests",
        "cloudEvents:type": event.type,
        "cloudEvents:subject": uuid_of(event.request_id),
        "sequence": event.sequence,
    }
    return spec.Basic.Properties(
        content_type="application/cloudevents+json",
        headers=headers if event.traceparent is None else {**headers, "traceparent": event.traceparent},
        delivery_mode=2,
        message_id=event.event_id,
        timestamp=event.created_at,
        message_type=event.type,
    )


def encoded_by_pamqp(event: OutboxRow, pieces: list[bytes]) -> bytes:
    """Return what aiormq would write."""
    frames: list[Any] = [
        spec.Basic.Publish(
            exchange=topology.REQUESTS, routing_key=event.type, mandatory=event.type == "request.created"
        ),
        ContentHeader(properties=properties_of(event), body_size=len(event.payload)),
        *map(ContentBody, pieces),
    ]
    return b"".join(pamqp.frame.marshal(frame, 7) for frame in frames)


@pytest.mark.parametrize("event_type", ["request.created", "request.calculated", "ü" * 100])
@pytest.mark.parametrize("sequence", [1, 127, 128, 40_000, 2**31])
@pytest.mark.parametrize("traceparent", [None, TRACEPARENT])
def test_event_is_encoded_as_pamqp_encodes_it(event_type, sequence, traceparent):
    event = outbox_row(sequence, type=event_type, traceparent=traceparent)

    encoded = encode_event(event, event.event_id, exchange=topology.REQUESTS, channel=7, longest_body=100)

    assert encoded == encoded_by_pamqp(event, [event.payload])


@pytest.mark.parametrize(
    ("longest", "pieces"),
    [
        (-8, [b"12345678"]),  # The broker sets no limit.
        (0, [b"12345678"]),
        (4, [b"1234", b"5678"]),
        (5, [b"12345", b"678"]),
        (8, [b"12345678"]),
    ],
)
def test_body_is_split_into_frames(longest, pieces):
    event = outbox_row(1, payload=b"12345678")

    encoded = encode_event(event, event.event_id, exchange=topology.REQUESTS, channel=7, longest_body=longest)

    assert encoded == encoded_by_pamqp(event, pieces)
