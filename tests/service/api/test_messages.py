"""Messages say what came, what is accepted and where; service/README.md lists all of them, and no other."""

import ast
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from deploy.local.machine.folders import CHECKOUT
from service.api import json_body, list_query
from service.api.errors import ApiError, InvalidSubmission
from service.api.idempotency_key_header import parse_key

_SERVICE = CHECKOUT / "service"
# The modules that word messages, those of refusals of fields and of HTTP included.
_MODULES = [
    *sorted((_SERVICE / "api").glob("*.py")),
    *sorted((_SERVICE / "authentication").glob("*.py")),
    _SERVICE / "text_rules.py",
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


def test_table_has_every_message_of_the_code_once_and_no_other():
    messages = [message for _, _, message, _, _ in rows()]

    assert sorted(messages) == sorted({text for module in _MODULES for text in sentences(module)})


def test_table_has_the_status_and_the_code_of_each_message_and_says_what_to_do():
    table = {message: (int(status), code.strip("`")) for status, code, message, _, _ in rows()}

    for status, code, message in refusals_in_code():
        assert table[message] == (status, code)
    assert all(cell and cell != "as it says" for *_, cause, remedy in rows() for cell in (cause, remedy))


def test_parameters_are_refused_with_what_came():
    with pytest.raises(InvalidSubmission) as refusal:
        list_query.parse_listing(b"limit=1&limit=2&limit=3&cursor=zqmark&zqmark=1&external_id=" + b"x" * 256)

    assert {error.field: error.message for error in refusal.value.errors} == {
        "limit": "This parameter was sent more than once: send it once.",
        "cursor": "Expected the next_cursor of an earlier page.",
        _MARK: "There is no such parameter: check its name.",
        "external_id": "Expected at most 255 characters, got 256.",
    }


def test_key_is_refused_with_its_length_and_two_keys_as_two():
    with pytest.raises(ApiError, match="has 256 characters: at most 255 "):
        parse_key(["k" * 256])
    with pytest.raises(ApiError, match="more than one"):
        parse_key(["k", "k"])
    assert parse_key([f'"{"k" * 255}"']) == "k" * 255


def test_compressed_body_is_refused_by_its_header():
    for encoding in ("gzip", "br", "GZIP", "identity, gzip"):
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
