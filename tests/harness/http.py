"""What the tests' HTTP clients have in common: each error that they get must be in service/README.md."""

import re
import ssl
from functools import cache
from typing import Final

import httpx

from tests.deploy import pages

# For plain HTTP. By default every client loads the authorities that the machine trusts, which takes 20 ms.
NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def lasting_headers(response: httpx.Response) -> list[tuple[str, str]]:
    """Return the headers, in order, without those that differ each time."""
    each_time = {"date", "server", "x-request-id"}
    return [(name, value) for name, value in response.headers.items() if name not in each_time]


@cache
def documented_errors() -> list[list[str]]:
    """Return the cells of each row of the table: status, code, message, cause and remedy."""
    return pages.rows(pages.API, "Errors", "status")


def is_documented(status: int, code: str, message: str) -> bool:
    return any(
        row[:2] == [str(status), f"`{code}`"] and re.fullmatch(re.escape(row[2]).replace("…", ".+"), message)
        for row in documented_errors()
    )


async def check_errors(response: httpx.Response) -> None:
    is_json = response.headers.get("Content-Type") == "application/json"
    if response.status_code >= 400 and is_json and await response.aread():
        for error in response.json().get("errors") or ():
            assert is_documented(response.status_code, error["code"], error["message"]), error
