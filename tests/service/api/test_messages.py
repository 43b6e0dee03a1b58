"""Messages say what came, what is accepted and where; service/README.md lists all of them, and no other."""

import ast
import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.api import list_query, request_body
from service.api.errors import ApiError, InvalidSubmission
from service.api.idempotency_key import parse_key
from service.calculation_requests.fields import META_DATA_DEPTH
from tests.harness.examples import A_REQUEST

_SERVICE = CHECKOUT / "service"
# The modules that word messages, those of refusals of fields and of HTTP included.
_MODULES = [
    *sorted((_SERVICE / "api").glob("*.py")),
    *sorted((_SERVICE / "authentication").glob("*.py")),
    _SERVICE / "lines.py",
]
_MARK = "zqmark"
_SENTENCE = re.compile(r"[A-Z].*\.", re.DOTALL)


def rows() -> list[list[str]]:
    """Return the cells of the table: status, code, message, cause and remedy."""
    page = (_SERVICE / "README.md").read_text()
    errors = page.partition("\n## Errors\n")[2].partition("\n## ")[0]
    table = [line.strip("|").split("|") for line in errors.splitlines() if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in row] for row in table]


def sentences(module: Path) -> Iterator[str]:
    """Return the sentences in a module that are no docstrings, with `…` for each part that varies."""
    nodes = list(ast.walk(ast.parse(module.read_text())))
    left_out = {node.value for node in nodes if isinstance(node, ast.Expr)}
    left_out |= {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if node not in left_out and _SENTENCE.fullmatch(text := _text(node)):
            yield text


def _text(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case ast.FormattedValue():
            return "…"
    return ""


def refusals_in_code() -> Iterator[tuple[HTTPStatus, str, str]]:
    """Return the status, code and message of each ApiError that the code makes with all three."""
    for module in _MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name(id="ApiError"),
                    args=[ast.Attribute(attr=status), ast.Constant(value=str() as code), message, *_],
                ) if _SENTENCE.fullmatch(_text(message)):
                    yield HTTPStatus[status], code, _text(message)


def test_table_has_every_message_of_the_code_once_and_no_other() -> None:
    messages = [message for _, _, message, _, _ in rows()]

    assert sorted(messages) == sorted({text for module in _MODULES for text in sentences(module)})


def test_table_has_the_status_and_the_code_of_each_message_and_says_what_to_do() -> None:
    table = {message: (int(status), code.strip("`")) for status, code, message, _, _ in rows()}

    for status, code, message in refusals_in_code():
        assert table[message] == (status, code)
    assert all(cell and cell != "as it says" for *_, cause, remedy in rows() for cell in (cause, remedy))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "it is empty"),
        (b" ", "it is empty"),
        (b'{"a": zqmark}', "invalid character (byte 6)"),
        (b'{"zqmark" 1}', "expected ':' (byte 10)"),
        (b'{"a": 1} zqmark', "trailing characters (byte 10)"),
        (b'{"a": "zqmark', "it ends too early (byte 13)"),
        (b'{"a": "zqmark\xff"}', "it is not UTF-8 (byte 13)"),
        (b'["zqmark\\q"]', "invalid escape character in string (byte 10)"),
        (b'{"a": 1e999999, "b": "zqmark"}', "a number is too large"),
        (b"[" * 100_000, "it nests too deeply"),
    ],
)
def test_malformed_body_is_refused_with_the_reason_and_the_position(body: bytes, reason: str) -> None:
    for sent in (body, body + b" " * 40_000):  # A large body is read in another way.
        with pytest.raises(ApiError) as refusal:
            request_body.parse(sent)

        if "early" not in reason or sent == body:
            assert str(refusal.value) == f"The body is not readable JSON: {reason}."
        assert _MARK not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("customer_email", 1, "Expected a string, got an integer."),
        (
            "customer_email",
            "a@b.example, c@d.example",
            "Expected the e-mail address of exactly one recipient.",
        ),
        ("customer_phone", [_MARK], "Expected a string or null, got an array."),
        ("customer_phone", "1" * 33, "Expected at most 32 characters, got 33."),
        ("case_ref", None, "Expected a string, got null."),
        ("case_ref", 1.5, "Expected a string, got a number."),
        ("case_ref", {_MARK: 1}, "Expected a string, got an object."),
        ("case_ref", _MARK * 50, "Expected at most 255 characters, got 300."),
        ("property_value", "300000", "Expected an integer or null, got a string."),
        ("property_value", True, "Expected an integer or null, got a boolean."),
        ("property_value", -1, "Expected an integer >= 0."),
        ("property_value", 10**13, "Expected an integer <= 1000000000000."),
        ("request_type", _MARK, "Expected SDLT_CALCULATION."),
        ("meta_data", [], "Expected an object or null, got an array."),
        ("meta_data", {"a": "x" * 16_377}, "Expected at most 16384 bytes of JSON, got 16385."),
        ("calculation_fee_exempt", 1, "Expected a boolean, got an integer."),
        (_MARK, 1, "There is no such field: check its name."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_field_is_refused_with_the_limit_and_what_came_in_the_words_of_json(
    name: str, value: object, message: str
) -> None:
    (error,) = refusals(A_REQUEST | {name: value})

    assert (error.field, error.message) == (name, message)
    assert _MARK not in error.message


@pytest.mark.parametrize("levels", [META_DATA_DEPTH + 1, 40, 900])
def test_meta_data_is_refused_with_the_number_of_its_levels(levels: int) -> None:
    nested: object = {"a": 1}
    for number in range(levels - 1):
        nested = {"a": nested, "b": 2**64} if number % 2 else [nested]
    meta_data = nested if isinstance(nested, dict) else {"a": nested}
    depth = levels + (meta_data is not nested)

    (error,) = refusals(A_REQUEST | {"meta_data": meta_data})

    assert error.message == f"Expected at most 16 levels of nesting, got {depth}."


def test_reason_of_a_waiver_is_refused_with_its_length() -> None:
    waived = A_REQUEST | {"calculation_fee_exempt": True, "calculation_fee_exempt_reason": "x" * 501}

    (error,) = refusals(waived)

    assert error.message == "Expected at most 500 characters, got 501."


def refusals(body: dict[str, Any]) -> Any:
    """Return the errors of a body whose waiver applies."""
    with pytest.raises(InvalidSubmission) as refusal:
        request_body.parse(json.dumps(body).encode()).validated(waiver_applies=True)
    return refusal.value.errors


def test_parameters_are_refused_with_what_came() -> None:
    with pytest.raises(InvalidSubmission) as refusal:
        list_query.parse_listing(b"limit=1&limit=2&limit=3&cursor=zqmark&zqmark=1&external_id=" + b"x" * 256)

    assert {error.field: error.message for error in refusal.value.errors} == {
        "limit": "This parameter was sent 3 times: send it once.",
        "cursor": "Expected the next_cursor of an earlier page.",
        _MARK: "There is no such parameter: check its name.",
        "external_id": "Expected at most 255 characters, got 256.",
    }


def test_key_is_refused_with_its_length_and_two_keys_as_two() -> None:
    with pytest.raises(ApiError, match="has 256 characters: at most 255 "):
        parse_key(["k" * 256])
    with pytest.raises(ApiError, match="more than one"):
        parse_key(["k", "k"])
    assert parse_key([f'"{"k" * 255}"']) == "k" * 255


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip"])
async def test_compressed_body_is_refused_by_its_header(
    shared_client: httpx.AsyncClient, encoding: str
) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    response = await shared_client.post("/v1/request", content=b"{}", headers=headers)

    (error,) = response.json()["errors"]
    assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
    assert "Content-Encoding" in error["message"]


async def test_body_that_is_declared_as_not_compressed_is_read(shared_client: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "Identity"}
    response = await shared_client.post("/v1/request", content=b"{}", headers=headers)

    assert response.status_code == 422


async def test_too_large_body_is_refused_with_its_size_if_it_is_known(
    shared_client: httpx.AsyncClient,
) -> None:
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
