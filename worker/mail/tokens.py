"""The token of each e-mail, by which a report of a mail server shows which e-mail it is about.

The token is the e-mail's key, and a code that only the holder of a key in REQUEST_SECRET_KEYS can make. So
nobody who has not seen the e-mail can forge a report about it.
"""

import hmac
import re
from typing import cast

from service.calculation_requests.email_changes import EmailId, Kind
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import parse_uuid

# Our own header has the token, too, because some providers, such as Amazon SES, replace the Message-ID.
HEADER = "Calculation-Request-Email"

_TOKEN = re.compile(
    r"(?P<uuid>req_[0-9A-Za-z]{22})\.(?P<kind>[a-z_]{1,32})\.(?P<number>[1-9]\d{0,8})\.(?P<code>[\w-]{22})",
    re.ASCII,
)


def make(email: EmailId, keys: SecretKeyRing, *, key_id: str) -> str:
    """Return the token of an e-mail, about 62 characters. With the key of its request, it never changes."""
    return f"{email.key}.{keys.email_code(email.key, key_id=key_id)}"


def find(text: str, keys: SecretKeyRing) -> EmailId | None:
    """Return the e-mail of the first token in a text that one of our keys has made."""
    for match in _TOKEN.finditer(text):
        if (request_id := parse_uuid(match["uuid"])) is not None:
            email = EmailId(request_id, int(match["number"]), cast("Kind", match["kind"]))
            codes = (keys.email_code(email.key, key_id=key_id) for key_id in keys.keys)
            if any(hmac.compare_digest(code, match["code"]) for code in codes):
                return email
    return None
