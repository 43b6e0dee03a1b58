"""The table of errors in service/README.md has every message that a caller can get, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from deploy.local.machine.folders import CHECKOUT
from service.api.errors import _KINDS

_SERVICE = CHECKOUT / "service"
# The modules that word messages, those of refusals of fields and of HTTP included.
_MODULES = [
    *sorted((_SERVICE / "api").glob("*.py")),
    *sorted((_SERVICE / "authentication").glob("*.py")),
    _SERVICE / "lines.py",
    _SERVICE / "server" / "refusals.py",
]
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


def test_table_has_every_message_of_the_code_once_and_no_other() -> None:
    messages = [message for _, _, message, _, _ in rows()]

    assert sorted(messages) == sorted({text for module in _MODULES for text in sentences(module)})


def test_table_has_the_status_and_the_code_of_each_message_and_says_what_to_do() -> None:
    table = {message: (int(status), code.strip("`")) for status, code, message, _, _ in rows()}

    for kind in _KINDS.values():
        if kind.message is not None:
            assert table[kind.message] == (kind.status, kind.code)
    assert all(cause and remedy for *_, cause, remedy in rows())
