"""The uuid of a request."""

from uuid import UUID

import pytest

from service.identifiers import new_request_id, parse_uuid, uuid_of


def test_uuids_sort_by_time():
    uuids = [uuid_of(new_request_id()) for _ in range(1000)]

    assert uuids == sorted(uuids)


@pytest.mark.parametrize("number", [0, 1, 61, 62, 2**128 - 1])
def test_uuid_has_a_fixed_width(number):
    uuid = uuid_of(UUID(int=number))

    assert len(uuid) == 26
    assert parse_uuid(uuid) == UUID(int=number)
    assert parse_uuid("req_7n42DGM5Tflk9n8mt7Fhc8") is None, "one more than 128 bits can hold"
