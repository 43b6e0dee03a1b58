"""What the tests' HTTP clients have in common."""

import ssl
from typing import Final

import httpx

# For plain HTTP. By default every client loads the authorities that the machine trusts, which takes 20 ms.
NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def lasting_headers(response: httpx.Response) -> list[tuple[str, str]]:
    """Return the headers, in order, without those that differ each time."""
    each_time = {"date", "server", "x-request-id"}
    return [(name, value) for name, value in response.headers.items() if name not in each_time]
