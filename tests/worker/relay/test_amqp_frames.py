"""The encoding of events, compared with pamqp's."""

from typing import Any

import msgspec
import pamqp.frame
import pytest
from aiormq import spec
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from service.identifiers import uuid_of
from tests.worker.relay.test_publisher import row
from worker.rabbitmq import topology
from worker.relay.amqp_frames import encode_event
from worker.relay.outbox_tables import OutboxRow

_TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def properties_of(event: OutboxRow) -> spec.Basic.Properties:
    """Return the AMQP properties of an event."""
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
            exchange=topology.REQUESTS,
            routing_key=event.type,
            mandatory=event.type == "request.created",
        ),
        ContentHeader(properties=properties_of(event), body_size=len(event.payload)),
        *map(ContentBody, pieces),
    ]
    return b"".join(pamqp.frame.marshal(frame, 7) for frame in frames)


@pytest.mark.parametrize("event_type", ["request.created", "request.calculated", "ü" * 100])
@pytest.mark.parametrize("sequence", [1, 127, 128, 40_000, 2**31])
@pytest.mark.parametrize("traceparent", [None, _TRACE])
def test_event_is_encoded_as_pamqp_encodes_it(event_type, sequence, traceparent):
    event = msgspec.structs.replace(row(sequence, event_type=event_type), traceparent=traceparent)

    encoded = encode_event(event, event.event_id, channel=7, longest_body=100)

    assert encoded == encoded_by_pamqp(event, [event.payload])


@pytest.mark.parametrize(
    ("payload", "pieces"),
    [(b"", []), (b"1234", [b"1234"]), (b"12345", [b"1234", b"5"]), (b"12345678", [b"1234", b"5678"])],
)
def test_large_body_is_split_into_frames(payload, pieces):
    event = row(1, payload=payload)

    encoded = encode_event(event, event.event_id, channel=7, longest_body=4)

    assert encoded == encoded_by_pamqp(event, pieces)


def test_body_is_one_frame_when_the_broker_sets_no_limit():
    event = row(1, payload=b"12345678")

    encoded = encode_event(event, event.event_id, channel=7, longest_body=-8)

    assert encoded == encoded_by_pamqp(event, [event.payload])


def test_type_that_is_too_long_cannot_be_encoded():
    event = row(1, event_type="x" * 256)

    with pytest.raises(ValueError, match="255"):
        encode_event(event, event.event_id, channel=7, longest_body=100)
