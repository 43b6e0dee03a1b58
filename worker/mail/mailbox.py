"""The mailbox of MAIL_FROM, to which mail servers send their reports, read by IMAP."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from http.client import HTTPException
from typing import TypeVar
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

import click
from imapclient import DELETED, FLAGGED, IMAPClient, SocketTimeout
from imapclient.exceptions import IMAPClientError, LoginError

from service.command_line.connecting import reason
from worker.mail import reports
from worker.settings import EmailSettings

_TIMEOUT = SocketTimeout(connect=5.0, read=20.0)
_LARGEST_TOKEN_BYTES = 100_000
_MOST_AT_ONCE = 200  # messages of one look
_BEGINNING = f"BODY.PEEK[]<0.{reports.LARGEST_BYTES}>"

Result = TypeVar("Result")


class MailboxUnavailable(click.ClickException):  # so that `doctor` shows the message
    """The mailbox at BOUNCES_URL cannot be read. The message says why."""


async def in_thread(step: Callable[[], Result]) -> Result:
    """Run a step that blocks. Raises MailboxUnavailable."""
    try:
        return await asyncio.to_thread(step)
    except (IMAPClientError, OSError, ValueError) as error:  # ValueError: a login that is not ASCII
        raise MailboxUnavailable(_explain(error)) from error


@asynccontextmanager
async def opened(settings: EmailSettings) -> AsyncIterator["Mailbox"]:
    """Open the mailbox until the block is left. Raises MailboxUnavailable."""
    mailbox = await in_thread(partial(Mailbox, settings.bounces_url or ""))
    try:
        await in_thread(partial(mailbox.open, settings.bounces_token_url))
        yield mailbox
    finally:
        mailbox.close()


class Mailbox:
    """A connection to the mailbox. IMAPClient blocks, so each step runs in a thread.

    The UIDs of messages are valid for one connection: the server may number them anew (UIDVALIDITY).
    """

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._client = IMAPClient(
            self._url.hostname, port=self._url.port, ssl=self._url.scheme == "imaps", timeout=_TIMEOUT
        )
        self._client.normalise_times = False  # Otherwise, times would be without a time zone.

    def open(self, token_url: str | None) -> None:
        """Log in, and open the folder for writing."""
        user = unquote(self._url.username or "")
        if token_url is None:
            self._client.login(user, unquote(self._url.password or ""))
        else:  # with XOAUTH2, because Exchange Online does not know OAUTHBEARER (RFC 7628)
            self._client.oauth2_login(user, _fetch_token(token_url))
        if not self._client.has_capability("UIDPLUS"):
            # Without it, only all deleted messages can be removed, also those that a person has deleted.
            raise MailboxUnavailable("the IMAP server lacks UIDPLUS (RFC 4315), which is needed")
        self._client.select_folder(unquote(self._url.path.strip("/")) or "INBOX")

    def find(self) -> list[int]:
        """Return the UIDs of the first new messages. Removes those that were handled before.

        imaplib accepts a line of up to a megabyte, which is about 125,000 UIDs.
        """
        if handled := self._client.search(["FLAGGED", "DELETED"]):
            self._client.uid_expunge(handled[:_MOST_AT_ONCE])
        return sorted(self._client.search(["UNFLAGGED", "UNDELETED"]))[:_MOST_AT_ONCE]

    def read(self, uids: Sequence[int]) -> list[tuple[int, datetime, bytes]]:
        """Return the UIDs, times and beginnings of those messages that still exist."""
        fetched = self._client.fetch(uids, [_BEGINNING, "INTERNALDATE"])
        return [
            (uid, each[b"INTERNALDATE"], each[b"BODY[]<0>"] or b"")
            for uid, each in fetched.items()
            if b"BODY[]<0>" in each  # A removed message may have its flags alone.
        ]

    def sort(self, handled: Sequence[int], for_people: Sequence[int]) -> None:
        """Mark messages that were *handled*, which `find` removes. Flag those that are *for_people*."""
        if handled:
            self._client.add_flags(handled, [DELETED, FLAGGED], silent=True)
        if for_people:
            self._client.add_flags(for_people, [FLAGGED], silent=True)

    def close(self) -> None:
        """Close the connection, without a word. A step that is running fails."""
        with suppress(IMAPClientError, OSError):
            # First for both ways and below TLS: otherwise, closing would wait for the server's next line.
            socket.socket.shutdown(self._client.socket(), socket.SHUT_RDWR)
            self._client.shutdown()


def _fetch_token(url_with_query: str) -> str:
    """Return a new access token by client credentials (RFC 6749, section 4.4). The query becomes the form."""
    url, _, form = url_with_query.partition("?")
    content = f"grant_type=client_credentials&{form}".encode()
    try:
        with urlopen(url, content, timeout=10.0) as response:  # noqa: S310 - https, by the settings
            return str(json.loads(response.read(_LARGEST_TOKEN_BYTES))["access_token"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        why = f"it answers {error.code}" if isinstance(error, HTTPError) else reason(error)
        raise MailboxUnavailable(f"BOUNCES_TOKEN_URL gives no access token: {why}") from None


def _explain(error: Exception) -> str:
    """Return why the mailbox is unavailable. The server's words are left out: they may quote the login."""
    if isinstance(error, LoginError):
        return "the IMAP server rejects the login"
    if isinstance(error, IMAPClientError):
        return "the IMAP server refuses a command: does the folder exist, and may the user write to it?"
    return reason(error)
