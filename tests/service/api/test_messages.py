"""Messages say what came, what is accepted and where. The page for callers has all of them."""

from typing import Any

import pytest

from service.api import json_body, list_query
from service.api.errors import ApiError, InvalidSubmission
from service.api.idempotency_key_header import parse_key
from tests.harness import documented_errors


def test_table_of_errors_says_why_each_happens_and_what_to_do():
    rows = documented_errors.rows()

    assert all(cell and cell != "as it says" for *_, cause, remedy in rows for cell in (cause, remedy))
    assert len({(status, message) for status, _, message, _, _ in rows}) == len(rows)


def test_parameters_are_refused_with_what_came():
    with pytest.raises(InvalidSubmission) as refusal:
        list_query.parse_listing(b"limit=1&limit=2&limit=3&cursor=zqmark&zqmark=1&external_id=" + b"x" * 256)

    assert {error.field: error.message for error in refusal.value.errors} == {
        "limit": "This parameter was sent more than once: send it once.",
        "cursor": "Expected the next_cursor of an earlier page.",
        "zqmark": "There is no such parameter: check its name.",
        "external_id": "Expected at most 255 characters, got 256.",
    }


def test_key_is_refused_with_its_length_and_two_keys_as_two():
    with pytest.raises(ApiError, match="has 256 characters: at most 255 "):
        parse_key(["k" * 256])
    with pytest.raises(ApiError, match="more than one"):
        parse_key(["k", "k"])
    assert parse_key([f'"{"k" * 255}"']) == "k" * 255


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip"])
def test_compressed_body_is_refused_by_its_header(encoding):
    with pytest.raises(ApiError, match="Content-Encoding"):
        json_body.check_declared("application/json", encoding)
    json_body.check_declared("application/json", "Identity")


async def test_too_large_body_is_refused_with_its_size_if_it_is_known(shared_client):
    async def chunks() -> Any:
        for _ in range(257):
            yield b" " * 1024

    json_headers = {"Content-Type": "application/json"}
    announced = await shared_client.post("/v1/request", content=b" " * 262_145, headers=json_headers)
    streamed = await shared_client.post("/v1/request", content=chunks(), headers=json_headers)

    assert [response.json()["errors"][0]["message"] for response in (announced, streamed)] == [
        "The body has 262145 bytes: at most 262144 (256 KiB) are accepted.",
        "The body is larger than 256 KiB: send less.",
    ]
