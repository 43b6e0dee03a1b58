"""Any struct can be a body: its decoding, errors and schema follow from its annotations."""

from datetime import date
from typing import Annotated, Any, Literal

import msgspec
import pytest
from litestar import Litestar, patch
from litestar.di import NamedDependency
from litestar.params import JSONBody, SkipValidation
from litestar.testing import AsyncTestClient
from msgspec import UNSET, Meta, UnsetType
from openapi_spec_validator import validate

from service import app
from service.api.bodies import ExternalId, Notes
from service.api.controllers.requests import Uuid
from service.api.decoding import BodyDecoder, Sent, parse, provide_query
from service.api.envelope import Envelope, ErrorCode, FieldError, succeed
from service.api.errors import InvalidSubmission
from service.api.openapi import document, documenting
from service.api.openapi.documenting import Documented
from service.authentication.access_tokens import WRITE
from service.calculation_requests import field_docs
from service.server.limits import LARGEST_BODY


class EveryType(Sent, frozen=True, kw_only=True):
    """A field of each type that the API takes, of some others, and of unions with null and UNSET."""

    a_str: Annotated[str, Meta(min_length=1, max_length=5)] | UnsetType = UNSET
    an_int: Annotated[int, Meta(ge=0, multiple_of=5)] | UnsetType = UNSET
    a_float: Annotated[float, Meta(lt=1)] | UnsetType = UNSET
    a_bool: bool | UnsetType = UNSET
    a_date: date | UnsetType | None = UNSET
    a_literal: Literal["a", "b"] | UnsetType | None = UNSET
    a_list: Annotated[list[int], Meta(max_length=2)] | UnsetType = UNSET
    a_raw: msgspec.Raw | UnsetType = UNSET
    a_union: int | str | UnsetType | None = UNSET


# For each field a valid value in JSON, and what other values are refused for.
VALID = {
    "a_str": "abc",
    "an_int": 5,
    "a_float": 0.5,
    "a_bool": True,
    "a_date": "2026-03-02",
    "a_literal": "a",
    "a_list": [1],
    "a_raw": {"a": [1]},
    "a_union": "x",
}
REFUSED: list[tuple[str, Any, ErrorCode, str]] = [
    ("a_str", None, "invalid_type", "Expected a string, got null."),
    ("a_str", "zqmark", "too_long", "Expected at most 5 characters, got 6."),
    ("a_str", "", "out_of_range", "Expected a string of length >= 1."),
    ("an_int", 1.5, "invalid_type", "Expected an integer, got a number."),
    ("an_int", True, "invalid_type", "Expected an integer, got a boolean."),
    ("an_int", -1, "out_of_range", "Expected an integer >= 0."),
    ("an_int", 7, "out_of_range", "Expected an integer that's a multiple of 5."),
    ("a_float", 1.5, "out_of_range", "Expected a number < 1.0."),
    ("a_bool", 1, "invalid_type", "Expected a boolean, got an integer."),
    ("a_date", "zqmark", "invalid_type", "Invalid RFC3339 encoded date."),
    ("a_date", 1, "invalid_type", "Expected a date or null, got an integer."),
    ("a_literal", "zqmark", "invalid_choice", "Expected a or b."),
    ("a_list", {}, "invalid_type", "Expected an array, got an object."),
    ("a_list", [1, 2, 3], "out_of_range", "Expected an array of length <= 2."),
    ("a_union", [], "invalid_type", "Expected an integer or a string or null, got an array."),
    ("zqmark", 1, "unknown_field", "There is no such field: check its name."),
]


def refusals(kind: type[Sent], body: object) -> list[FieldError]:
    with pytest.raises(InvalidSubmission) as refusal:
        parse(kind, msgspec.json.encode(body))
    return refusal.value.errors


def test_every_type_is_decoded_and_a_field_that_is_left_out_is_unset():
    parsed = parse(EveryType, msgspec.json.encode(VALID))

    assert VALID.keys() == set(EveryType.__struct_fields__)
    assert msgspec.json.decode(msgspec.json.encode(parsed)) == VALID
    assert parse(EveryType, b"{}") == EveryType()


@pytest.mark.parametrize(("name", "value", "code", "message"), REFUSED, ids=ascii)
def test_field_of_any_type_is_refused_in_the_words_of_json_beside_others(name, value, code, message):
    expected = FieldError(code, message, name, f"/{name}")
    other = FieldError("invalid_type", "Expected a boolean, got a string.", "a_bool", "/a_bool")

    assert refusals(EveryType, VALID | {name: value}) == [expected]
    if name != "a_bool":
        found = refusals(EveryType, VALID | {name: value, "a_bool": "zqmark"})
        assert sorted(found, key=str) == sorted([expected, other], key=str)


class NotesBody(Sent, frozen=True, kw_only=True):
    """Changes of what is the firm's alone."""

    notes: Annotated[Notes | UnsetType | None, field_docs.NOTES] = UNSET
    external_id: Annotated[ExternalId | UnsetType | None, field_docs.EXTERNAL_ID] = UNSET


class Changed(msgspec.Struct):
    """What is to be changed."""

    fields: list[str]


class CountQuery(Sent, frozen=True, kw_only=True):
    """How often."""

    count: Annotated[int, Meta(ge=1, description="How often.")] = 1


@patch(
    "/v1/change/{uuid:str}",
    dto=BodyDecoder[NotesBody],
    dependencies={"parameters": provide_query(CountQuery)},
    security=[{"access_token": [WRITE]}],
    documented=Documented(answers={"ok": Changed(["notes"])}, refused=b'{"notes": 1}'),
)
async def change(
    uuid: Uuid,  # noqa: ARG001
    data: JSONBody[NotesBody],
    parameters: NamedDependency[SkipValidation[CountQuery]],
) -> Envelope[Changed]:
    """Change a request. No field is required."""
    sent = [name for name, value in msgspec.structs.asdict(data).items() if value is not UNSET]
    return succeed(Changed(sent * parameters.count))


@pytest.fixture
async def client():
    """A client of an application with an endpoint that takes a body and a query of its own."""
    async with AsyncTestClient(Litestar([change], **app.of_endpoints())) as connected:
        yield connected


async def test_handler_gets_what_was_sent_of_a_body_of_its_own(client):
    nothing = await client.patch("/v1/change/req_1", json={})
    both = await client.patch("/v1/change/req_1?count=2", json={"notes": None, "external_id": "crm-17"})

    assert nothing.json()["data"] == {"fields": []}
    assert both.json()["data"] == {"fields": ["notes", "external_id"] * 2}


@pytest.mark.parametrize(
    ("sent", "status", "found"),
    [
        ({"json": {"notes": 1, "external_id": "a\x00b", "other": 1}}, 422, "notes external_id other"),
        ({"json": {"notes": "a\x00b"}}, 422, "notes"),
        ({"json": {}, "params": {"count": "0", "a": "b"}}, 422, "count a"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "None"),
        ({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "None"),
        ({"content": b"{}"}, 415, "None"),
        ({"content": b"", "headers": {"Content-Type": "application/json"}}, 400, "None"),
        ({"json": {"notes": "x" * LARGEST_BODY}}, 413, "None"),
    ],
    ids=ascii,
)
async def test_body_of_its_own_is_refused_as_any_other(client, sent, status, found):
    refused = await client.patch("/v1/change/req_1", **sent)

    assert refused.status_code == status
    assert [str(error["field"]) for error in refused.json()["errors"]] == found.split()


def test_document_describes_a_body_and_a_query_of_its_own():
    application = Litestar([*app.ENDPOINTS, change], openapi_config=document.config(), **app.of_endpoints())
    completed = documenting.complete(application)

    validate(completed)
    operation = completed["paths"]["/v1/change/{uuid}"]["patch"]
    assert completed["components"]["schemas"]["NotesBody"]["properties"]["notes"] == {
        "type": ["string", "null"],
        "maxLength": 10_000,
        "pattern": "^[^\\x00]*$",
        "description": field_docs.NOTES.description,
        "examples": field_docs.NOTES.examples,
    }
    assert operation["requestBody"]["content"]["application/json"] == {
        "schema": {"$ref": "#/components/schemas/NotesBody"},
        "examples": {
            "full": {"value": {"notes": "Call before noon.\nCompletion is in May.", "external_id": "crm-17"}}
        },
    }
    (count,) = [each for each in operation["parameters"] if each.get("in") == "query"]
    assert count["schema"] == {"type": "integer", "minimum": 1, "default": 1}
    assert (operation["summary"], operation["description"]) == ("Change a request", "No field is required.")
    failures = {*operation["responses"]["415"]["content"]["application/json"]["examples"]}
    assert failures == {"not_json", "compressed"}
    assert "refused_fields" in operation["responses"]["422"]["content"]["application/json"]["examples"]
    assert operation["responses"].keys() >= {"200", "400", "401", "403", "404", "408", "410", "413", "503"}
