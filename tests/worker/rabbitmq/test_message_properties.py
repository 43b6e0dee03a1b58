"""Properties are decoded as pamqp does; those that it cannot decode are left out and named."""

import struct
from datetime import UTC, datetime

import pytest
from pamqp.base import BasicProperties
from pamqp.commands import Basic

from tests.harness.raw_messages import UNDECODABLE as RAW
from worker.rabbitmq.message_properties import UNDECODABLE

EVERY = Basic.Properties(
    content_type="application/json",
    content_encoding="utf-8",
    headers={"a": 1, "b": {"c": ["d", None]}, "t": datetime(2026, 1, 1, tzinfo=UTC)},
    delivery_mode=2,
    priority=3,
    correlation_id="4",
    reply_to="5",
    expiration="6",
    message_id="7",
    timestamp=datetime(2026, 1, 2, tzinfo=UTC),
    message_type="8",
    user_id="9",
    app_id="10 é",
)


def test_decodable_properties_are_as_pamqp_decodes_them():
    written = EVERY.marshal()
    flags, data = struct.unpack(">H", written[:2])[0], written[2:]
    ours, theirs = Basic.Properties(), Basic.Properties()

    ours.unmarshal(flags, data)
    BasicProperties.unmarshal(theirs, flags, data)

    assert ours == theirs == EVERY


@pytest.mark.parametrize("what", RAW)
def test_undecodable_property_is_left_out_and_named_and_the_others_are_read(what):
    name, written = RAW[what]
    parts = {name: written, "user_id": b"\x02me", "app_id": b"\x02we"} | {name: written}
    data = b"".join(parts[each] for each in Basic.Properties.attributes() if each in parts)
    properties = Basic.Properties()

    properties.unmarshal(sum(Basic.Properties.flags[each] for each in parts), data)

    assert properties.headers == {UNDECODABLE: name}
    assert properties.user_id == "me"
    assert properties.app_id == (None if name == "app_id" else "we")
