"""Properties that pamqp cannot decode are left out and named."""

import pytest
from pamqp.commands import Basic

from tests.harness.raw_messages import UNDECODABLE as RAW
from worker.rabbitmq.message_properties import UNDECODABLE


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
