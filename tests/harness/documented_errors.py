"""The table of errors in service/README.md. Each error that a test's client gets must be in it."""

import re

import httpx

from tests.deploy import pages


def rows() -> list[list[str]]:
    """Return the cells of each row: status, code, message, cause and remedy."""
    return pages.rows(pages.API, "Errors", "status")


_TABLE = [
    (int(status), code.strip("`"), re.compile(re.escape(message).replace("…", ".+")))
    for status, code, message, _, _ in rows()
]


def is_documented(status: int, code: str, message: str) -> bool:
    return any((status, code) == row[:2] and row[2].fullmatch(message) for row in _TABLE)


async def check(response: httpx.Response) -> None:
    is_json = response.headers.get("Content-Type") == "application/json"
    if response.status_code >= 400 and is_json and await response.aread():
        for error in response.json().get("errors") or ():
            assert is_documented(response.status_code, error["code"], error["message"]), error
