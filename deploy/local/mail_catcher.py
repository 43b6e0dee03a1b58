"""An SMTP server that writes each accepted message to a file: what customers would have received."""

import argparse
import asyncio
import itertools
import os
import signal
import time
from pathlib import Path

from aiosmtpd.smtp import SMTP, Envelope, Session

_numbers = itertools.count()
# What these mailboxes answer in each domain that ends with `.test`.
_REFUSALS = {"perm-fail": "550 5.1.1 No such mailbox", "temp-fail": "451 4.2.1 Try again later"}


class MailCatcher:
    """The handler of the SMTP server: one `.eml` file a message, byte for byte."""

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
        """Accept the message, or answer 451, try again later, if it cannot be written."""
        try:
            name = await asyncio.to_thread(keep, self._folder, envelope.original_content or b"")
        except OSError as error:
            return f"451 4.3.0 The message cannot be written: {error.strerror}"
        return f"250 2.0.0 Kept as {name}"


def keep(folder: Path, message: bytes) -> str:
    """Write *message* to a new file and return its name. Names sort by time."""
    name = f"{time.time_ns()}-{os.getpid()}-{next(_numbers):06d}.eml"
    # Renamed when complete: a reader of .eml files never sees half a message.
    unfinished = folder / f"{name}.part"
    try:
        unfinished.write_bytes(message)
        unfinished.rename(folder / name)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return name


async def catch_mail(folder: Path, port: int) -> None:
    """Serve SMTP on the loopback interface until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    handler = MailCatcher(folder)
    server = await loop.create_server(
        lambda: SMTP(handler, hostname="localhost", enable_SMTPUTF8=True, loop=loop), "127.0.0.1", port
    )
    await stop.wait()
    server.close()


def main() -> None:
    """Run the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    os.umask(0o077)  # The e-mails hold the secrets of requests.
    arguments.folder.mkdir(parents=True, exist_ok=True)
    arguments.folder.chmod(0o700)  # A folder of an earlier run may be open to all.
    asyncio.run(catch_mail(arguments.folder, arguments.port))


if __name__ == "__main__":
    main()
