"""An SMTP server that writes each accepted message to a file: what customers would have received.

`python -m deploy.local.mail_catcher PORT FOLDER` serves on the loopback interface until a signal ends it.
"""

import os
import signal
import sys
import time
from pathlib import Path

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session

# What these mailboxes answer in each domain that ends with `.test`.
_REFUSALS = {"perm-fail": "550 5.1.1 No such mailbox", "temp-fail": "451 4.2.1 Try again later"}


class MailCatcher:
    """The handler of the SMTP server: one `.eml` file a message, byte for byte. Names sort by time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, _server: SMTP, _session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        """Accept the recipient, unless it is an address that fails on purpose."""
        mailbox, _, domain = address.partition("@")
        if mailbox in _REFUSALS and domain.endswith(".test"):
            return _REFUSALS[mailbox]
        envelope.rcpt_tos.append(address)
        return "250 2.1.5 OK"

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802 - aiosmtpd's name
        """Accept the message, unless it cannot be written now."""
        file = self._folder / f"{time.time_ns()}.eml"
        # Renamed when complete: a reader of .eml files never sees half a message.
        unfinished = file.with_suffix(".part")
        try:
            unfinished.write_bytes(envelope.original_content or b"")
            unfinished.rename(file)
        except OSError as error:
            return f"451 4.3.0 Not kept: {error.strerror}"
        return f"250 2.0.0 Kept as {file.name}"


def main() -> None:
    """Run the server."""
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    os.umask(0o077)  # The e-mails hold the secrets of requests.
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    catcher = Controller(
        MailCatcher(folder),
        hostname="127.0.0.1",
        port=port,
        server_hostname="localhost",  # Otherwise it would be looked up in DNS.
        ready_timeout=10.0,
    )
    catcher.start()
    signal.pause()


if __name__ == "__main__":
    main()
