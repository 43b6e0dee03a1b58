"""The table of errors in service/README.md. Each error that a test's client gets must be in it."""

import re
from functools import cache

import httpx

from tests.deploy import pages


@cache
def rows() -> list[list[str]]:
    """Return the cells of each row: status, code, message, cause and remedy."""
    return pages.rows(pages.API, "Errors", "status")


def is_documented(status: int, code: str, message: str) -> bool:
    return any(
        row[:2] == [str(status), f"`{code}`"] and re.fullmatch(re.escape(row[2]).replace("…", ".+"), message)
        for row in rows()
    )


async def check(response: httpx.Response) -> None:
    is_json = response.headers.get("Content-Type") == "application/json"
    if response.status_code >= 400 and is_json and await response.aread():
        for error in response.json().get("errors") or ():
            assert is_documented(response.status_code, error["code"], error["message"]), error
