"""The uuid of a request."""

from uuid import UUID

import pytest

from service.identifiers import new_request_id, parse_uuid, uuid_of


def test_uuid_is_parsed_back_to_its_id():
    ids = [new_request_id() for _ in range(100)]

    assert [parse_uuid(uuid_of(request_id)) for request_id in ids] == ids


def test_uuids_sort_by_time():
    uuids = [uuid_of(new_request_id()) for _ in range(1000)]

    assert uuids == sorted(uuids)


@pytest.mark.parametrize("number", [0, 1, 61, 62, 2**128 - 1])
def test_uuid_has_a_fixed_width(number):
    uuid = uuid_of(UUID(int=number))

    assert len(uuid) == 26
    assert parse_uuid(uuid) == UUID(int=number)


def test_number_of_more_than_128_bits_is_not_a_uuid():
    assert parse_uuid("req_7n42DGM5Tflk9n8mt7Fhc7") == UUID(int=2**128 - 1)
    assert parse_uuid("req_7n42DGM5Tflk9n8mt7Fhc8") is None
