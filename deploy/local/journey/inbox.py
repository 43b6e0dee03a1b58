"""The customer's inbox: the files that the mail catcher of `make run` writes."""

import re
from contextlib import suppress
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path

from litestar import MediaType, Response, get
from litestar.exceptions import NotFoundException

from deploy.local.journey.resources import TeamRequest

_NEWEST = 500
# The e-mail has a style of its own. Its links open new tabs, and nothing in it runs.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'; "
    "sandbox allow-popups allow-popups-to-escape-sandbox"
)


def newest(folder: str, uuid: str) -> tuple[str, EmailMessage | None]:
    """Return the name and content of the newest e-mail about a request, if it is among the newest of all."""
    for file in sorted(Path(folder).glob("*.eml"), reverse=True)[:_NEWEST]:
        with suppress(FileNotFoundError):  # It was removed at this moment.
            source = file.read_bytes()
            if re.search(rb"Message-ID:\s+<%b\." % uuid.encode(), source):  # may be folded
                return file.name, message_from_bytes(source, policy=policy.default)
    return "", None


@get("/inbox/{uuid:str}", media_type=MediaType.HTML)
async def show_email(request: TeamRequest) -> Response[str]:
    """Return the HTML of the newest e-mail about a request, for a sandboxed frame."""
    _, email = newest(request.resources.settings.mail_dir, request.uuid)
    body = email.get_body(("html",)) if email else None
    if body is None:
        raise NotFoundException("There is no e-mail yet.")
    page = body.get_content().replace("<body", '<base target="_blank"><body', 1)
    return Response(page, headers={"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"})
