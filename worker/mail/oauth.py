"""Gets the access token with which the mailbox is opened, if the mail provider accepts no password."""

from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import msgspec

from service.command_line.connecting import reason
from worker.settings import EmailSettings

_TIMEOUT_SECONDS = 10.0
_LARGEST_RESPONSE = 64 * 1024


class NoAccessToken(OSError):
    """BOUNCES_TOKEN_URL gave no access token. The message says why."""


class _TokenResponse(msgspec.Struct):
    """A response of the token endpoint (RFC 6749, section 5.1). Other fields are ignored."""

    access_token: str


def fetch_token(settings: EmailSettings) -> str:
    """Return a new access token for the client's own credentials (RFC 6749, section 4.4).

    It blocks. It uses urllib, because a worker needs no HTTP client for anything else.
    """
    form = {
        "grant_type": "client_credentials",
        "client_id": settings.bounces_client_id,
        "client_secret": settings.bounces_client_secret,
        "scope": settings.bounces_scope,
    }
    body = urlencode({name: value for name, value in form.items() if value}).encode()
    request = Request(settings.bounces_token_url or "", body, {"Accept": "application/json"})  # noqa: S310 - https
    try:
        with urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 - https
            content = response.read(_LARGEST_RESPONSE)
        return msgspec.json.decode(content, type=_TokenResponse).access_token
    except HTTPError as error:
        error.close()
        raise NoAccessToken(f"BOUNCES_TOKEN_URL answers {error.code}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise NoAccessToken(f"BOUNCES_TOKEN_URL gives no access token: {reason(error)}") from error
