"""The mailbox of MAIL_FROM, to which mail servers send their reports, read by IMAP."""

import asyncio
import imaplib
import json
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from http.client import HTTPException
from threading import Thread, Timer
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import urlopen

import click

from service.command_line.connecting import reason
from worker.mail import reports
from worker.settings import EmailSettings

_SECONDS = 20.0  # to connect, and for the next bytes of an answer
_LARGEST_TOKEN_BYTES = 100_000
_MOST_AT_ONCE = 200  # messages of one look
_MOST_BYTES = 256 * reports.LARGEST_BYTES  # from the server, in one look
_LONGEST_LOOK_SECONDS = 100.0
# Of imaplib's errors, which are named so.
_REFUSED = "the IMAP server refuses or sends too much: does the folder exist, and may the user write to it?"
_EXPLAINED = {"abort": "the connection was lost", "error": _REFUSED, "readonly": _REFUSED}

Result = TypeVar("Result")


class MailboxUnavailable(click.ClickException):  # so that `doctor` shows the message
    """The mailbox at BOUNCES_URL cannot be read. The message says why."""


async def in_thread(step: Callable[[], Result]) -> Result:
    """Run a step that blocks. With `asyncio.to_thread`, a process that stops would wait for its end."""
    ended: Future[Result] = Future()
    ended.set_running_or_notify_cancel()

    def run() -> None:
        try:
            ended.set_result(step())
        except BaseException as error:  # noqa: BLE001 - raised where the step is awaited
            ended.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(ended)


class Mailbox(imaplib.IMAP4):
    """A connection to the mailbox, which blocks. It reads a bounded number of bytes, for a bounded time.

    The documentation of imaplib lets the methods be overridden that are. The UIDs of messages are valid for
    one connection: the server may number them anew (UIDVALIDITY).
    """

    _left = _MOST_BYTES

    def open(self, *address: Any, **timeout: Any) -> None:  # noqa: ANN401 - imaplib's two classes differ
        """Do what imaplib does. Its timeout never ends a read if a byte comes now and then."""
        super().open(*address, **timeout)
        self._end = Timer(_LONGEST_LOOK_SECONDS, self.socket().shutdown, [socket.SHUT_RDWR])
        self._end.daemon = True
        self._end.start()

    def shutdown(self) -> None:
        """Do what imaplib does."""
        self._end.cancel()
        super().shutdown()

    def read(self, size: int) -> bytes:
        """Do what imaplib does."""
        self._take(size)
        return super().read(size)

    def readline(self) -> bytes:
        """Do what imaplib does."""
        line = super().readline()
        self._take(len(line))
        return line

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise self.error("The server sends too much.")

    def enter(self, url: SplitResult, token_url: str | None) -> None:
        """Log in, and open the folder for writing."""
        user, password = unquote(url.username or ""), unquote(url.password or "")
        mechanism, login = "PLAIN", f"\0{user}\0{password}"
        if token_url is not None:  # with XOAUTH2: Exchange Online does not know OAUTHBEARER (RFC 7628)
            mechanism, login = "XOAUTH2", f"user={user}\1auth=Bearer {_fetch_token(token_url)}\1\1"
        try:
            self.authenticate(mechanism, lambda _: login.encode())
        except self.abort:
            raise
        except self.error:
            raise MailboxUnavailable("the IMAP server rejects the login") from None
        if b"UIDPLUS" not in _words(self.capability()):
            # Without it, only all deleted messages can be removed, also those that a person has deleted.
            raise MailboxUnavailable("the IMAP server lacks UIDPLUS (RFC 4315), which is needed")
        _checked(self.select(_quoted(unquote(url.path.strip("/")) or "INBOX")))

    def find_new(self) -> list[int]:
        """Return the UIDs of the newest messages that are new. Removes those that were handled before."""
        if handled := self._find("FLAGGED DELETED"):
            self._do("EXPUNGE", handled)
        return self._find("UNFLAGGED UNDELETED")

    def beginning_of(self, uid: int) -> bytes | None:
        """Return the beginning of a message, unless it cannot be read, or was removed meanwhile."""
        _, parts = self.uid("FETCH", str(uid), f"(BODY.PEEK[]<0.{reports.LARGEST_BYTES}>)")
        return next((part[1] for part in parts if isinstance(part, tuple)), None)

    def mark(self, handled: Sequence[int], for_people: Sequence[int]) -> None:
        """Mark messages that were *handled*, which `find_new` removes. Flag those that are *for_people*."""
        for uids, flags in ((handled, r"(\Deleted \Flagged)"), (for_people, r"(\Flagged)")):
            if uids:
                self._do("STORE", uids, "+FLAGS.SILENT", flags)

    def _find(self, criteria: str) -> list[int]:
        return sorted(map(int, _words(self.uid("SEARCH", criteria))))[-_MOST_AT_ONCE:]

    def _do(self, command: str, uids: Sequence[int], *arguments: str) -> None:
        _checked(self.uid(command, ",".join(map(str, uids)), *arguments))


class _MailboxOverTls(Mailbox, imaplib.IMAP4_SSL):
    """A mailbox whose connection is encrypted."""


@contextmanager
def opened(settings: EmailSettings) -> Iterator[Mailbox]:
    """Open the mailbox until the block is left. Raises MailboxUnavailable."""
    url = urlsplit(settings.bounces_url or "")
    host = url.hostname or ""
    try:
        if url.scheme == "imaps":
            tls = ssl.create_default_context()
            mailbox: Mailbox = _MailboxOverTls(host, url.port or 993, ssl_context=tls, timeout=_SECONDS)
        else:
            mailbox = Mailbox(host, url.port or 143, timeout=_SECONDS)
        try:
            mailbox.enter(url, settings.bounces_token_url)
            yield mailbox
        finally:
            mailbox.shutdown()  # without a word, which a server might not answer
    except (imaplib.IMAP4.error, OSError, ValueError) as error:  # ValueError: an answer that is not IMAP
        why = reason(error)  # not the server's words, which may quote the login
        raise MailboxUnavailable(_EXPLAINED.get(why, why)) from error


def _quoted(folder: str) -> str:
    """Return the name of a folder in quotes and modified UTF-7 (RFC 3501, sections 4.3 and 5.1.3)."""
    encoded = re.sub(
        "&|[^ -~]+",
        lambda part: f"&{b64encode(part[0].strip('&').encode('utf-16-be'), b'+,').decode().rstrip('=')}-",
        folder,
    )
    return json.dumps(encoded)  # JSON quotes printable ASCII as IMAP does.


def _checked(answer: tuple[str, list[Any]]) -> list[Any]:
    """Return the data of an answer, unless it refuses the command."""
    status, data = answer
    if status != "OK":
        raise imaplib.IMAP4.error
    return data


def _words(answer: tuple[str, list[Any]]) -> list[bytes]:
    return b" ".join(filter(None, _checked(answer))).split()


def _fetch_token(url_with_query: str) -> str:
    """Return a new access token by client credentials (RFC 6749, section 4.4). The query becomes the form."""
    url, _, form = url_with_query.partition("?")
    content = f"grant_type=client_credentials&{form}".encode()
    try:
        with urlopen(url, content, timeout=_SECONDS) as response:  # noqa: S310 - https, by the settings
            return str(json.loads(response.read(_LARGEST_TOKEN_BYTES))["access_token"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        why = f"it answers {error.code}" if isinstance(error, HTTPError) else reason(error)
        raise MailboxUnavailable(f"BOUNCES_TOKEN_URL gives no access token: {why}") from None
