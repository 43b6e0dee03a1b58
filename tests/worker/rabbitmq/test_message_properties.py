"""Properties that pamqp cannot decode, or that aio-pika refuses, are left out and named."""

import pytest
from pamqp.commands import Basic

from tests.harness.raw_messages import UNDECODABLE as RAW
from worker.rabbitmq.message_properties import UNDECODABLE

REFUSED = {"delivery_mode 3": ("delivery_mode", b"\x03"), "expiration of a word": ("expiration", b"\x01x")}


@pytest.mark.parametrize(("name", "written"), (RAW | REFUSED).values(), ids=RAW | REFUSED)
def test_undecodable_property_is_left_out_and_named_and_the_others_are_read(name, written):
    parts = {name: written, "user_id": b"\x02me", "app_id": b"\x02we"} | {name: written}
    data = b"".join(parts[each] for each in Basic.Properties.attributes() if each in parts)
    properties = Basic.Properties()

    properties.unmarshal(sum(Basic.Properties.flags[each] for each in parts), data)

    assert properties.headers == {UNDECODABLE: name}
    assert properties.user_id == "me"
    assert properties.app_id == (None if name == "app_id" else "we")
