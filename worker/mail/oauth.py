"""Gets the access token with which the mailbox is opened, if the mail provider accepts no password."""

import json
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

from service.command_line.connecting import reason
from worker.settings import EmailSettings

_TIMEOUT_SECONDS = 10.0


class NoAccessToken(OSError):
    """BOUNCES_TOKEN_URL gave no access token. The message says why."""


def fetch_token(settings: EmailSettings) -> str:
    """Return a new access token for the client's own credentials (RFC 6749, section 4.4). It blocks."""
    form = {
        "grant_type": "client_credentials",
        "client_id": settings.bounces_client_id,
        "client_secret": settings.bounces_client_secret,
        "scope": settings.bounces_scope or "",
    }
    url = settings.bounces_token_url or ""  # It begins with https.
    try:
        with urlopen(url, urlencode(form).encode(), timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310
            return str(json.load(response)["access_token"])
    except HTTPError as error:
        error.close()
        raise NoAccessToken(f"BOUNCES_TOKEN_URL answers {error.code}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise NoAccessToken(f"BOUNCES_TOKEN_URL gives no access token: {reason(error)}") from error
