"""The mailbox of MAIL_FROM, to which mail servers send their reports, read by IMAP."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
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
# imaplib accepts no line of over a megabyte. So many UIDs are at most 110,000 bytes.
_SEARCHED_AT_ONCE = 10_000
_BEGINNING = f"BODY.PEEK[]<0.{reports.LARGEST_BYTES}>"

Result = TypeVar("Result")


class MailboxUnavailable(click.ClickException):  # so that `doctor` shows the message
    """The mailbox at BOUNCES_URL cannot be read. The message says why."""


@asynccontextmanager
async def opened(settings: EmailSettings) -> AsyncIterator["Mailbox"]:
    """Open the mailbox until the block is left. Raises MailboxUnavailable."""
    mailbox = Mailbox(settings)
    try:
        await mailbox.in_thread(mailbox.open)
        yield mailbox
    finally:
        mailbox.close()


class Mailbox:
    """A connection to the mailbox. IMAPClient blocks, so each step runs in a thread.

    The UIDs of messages are valid for one connection: the server may number them anew (UIDVALIDITY).
    """

    def __init__(self, settings: EmailSettings) -> None:
        self._settings = settings
        self._client: IMAPClient | None = None
        self._messages = 0

    async def in_thread(self, step: Callable[[], Result]) -> Result:
        """Run a step. If this is cancelled, wait until the thread has ended. Raises MailboxUnavailable."""
        running = asyncio.ensure_future(asyncio.to_thread(step))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if self._client is not None:
                with suppress(OSError):
                    # Not `shutdown` of SSLSocket, after which the thread might write without encryption.
                    socket.socket.shutdown(self._client.socket(), socket.SHUT_RDWR)
            await asyncio.gather(running, return_exceptions=True)
            raise
        except (IMAPClientError, OSError, ValueError) as error:  # ValueError: a login that is not ASCII
            raise MailboxUnavailable(_explain(error)) from error

    def open(self) -> None:
        """Connect, log in, and open the folder for writing."""
        url = urlsplit(self._settings.bounces_url or "")
        self._client = client = IMAPClient(
            url.hostname, port=url.port, ssl=url.scheme == "imaps", timeout=_TIMEOUT
        )
        client.normalise_times = False  # Otherwise, times would be without a time zone.
        self._log_in(client, unquote(url.username or ""), unquote(url.password or ""))
        if not client.has_capability("UIDPLUS"):
            # Without it, only all deleted messages can be removed, also those that a person has deleted.
            raise MailboxUnavailable("the IMAP server lacks UIDPLUS (RFC 4315), which is needed")
        self._messages = client.select_folder(unquote(url.path.strip("/")) or "INBOX")[b"EXISTS"]

    def _log_in(self, client: IMAPClient, user: str, password: str) -> None:
        if self._settings.bounces_token_url is None:
            client.login(user, password)
        else:  # with XOAUTH2, because Exchange Online does not know OAUTHBEARER (RFC 7628)
            client.oauth2_login(user, _fetch_token(self._settings.bounces_token_url))

    def find(self) -> list[int]:
        """Return the UIDs of the first new messages. Removes those that an earlier look has handled."""
        new = self._search("UNFLAGGED", "UNDELETED")
        if handled := self._search("FLAGGED", "DELETED"):
            self._connected.uid_expunge(handled)
        return new

    def _search(self, *flags: str) -> list[int]:
        found: list[int] = []
        for first in range(1, self._messages + 1, _SEARCHED_AT_ONCE):
            numbers = f"{first}:{min(first + _SEARCHED_AT_ONCE - 1, self._messages)}"
            found += self._connected.search([numbers, *flags])
            if len(found) >= _MOST_AT_ONCE:
                break
        return sorted(found)[:_MOST_AT_ONCE]

    def read(self, uids: Sequence[int]) -> list[tuple[int, datetime, bytes]]:
        """Return the UIDs, times and beginnings of those messages that still exist.

        BODYSTRUCTURE is not asked for: it is as long as the sender likes.
        """
        fetched = self._connected.fetch(uids, [_BEGINNING, "INTERNALDATE"])
        return [
            (uid, each[b"INTERNALDATE"], each[b"BODY[]<0>"] or b"")
            for uid, each in fetched.items()
            if b"BODY[]<0>" in each  # A removed message may have its flags alone.
        ]

    def sort(self, handled: Sequence[int], for_people: Sequence[int]) -> None:
        """Mark messages that were *handled*, which `find` removes. Flag those that are *for_people*."""
        if handled:
            self._connected.add_flags(handled, [DELETED, FLAGGED], silent=True)
        if for_people:
            self._connected.add_flags(for_people, [FLAGGED], silent=True)

    def close(self) -> None:
        """Close the connection, without a word. No step may be running."""
        if self._client is not None:
            with suppress(IMAPClientError, OSError):
                self._client.shutdown()

    @property
    def _connected(self) -> IMAPClient:
        assert self._client is not None  # noqa: S101
        return self._client


def _fetch_token(url_with_query: str) -> str:
    """Return a new access token by client credentials (RFC 6749, section 4.4). The query becomes the form."""
    url, _, form = url_with_query.partition("?")
    content = f"grant_type=client_credentials&{form}".encode()
    try:
        with urlopen(url, content, timeout=10.0) as response:  # noqa: S310 - https, by the settings
            return str(json.loads(response.read(_LARGEST_TOKEN_BYTES))["access_token"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"it answers {error.code}" if isinstance(error, HTTPError) else reason(error)
        raise MailboxUnavailable(f"BOUNCES_TOKEN_URL gives no access token: {why}") from None


def _explain(error: Exception) -> str:
    """Return why the mailbox is unavailable. The server's words are left out: they may quote the login."""
    if isinstance(error, LoginError):
        return "the IMAP server rejects the login"
    if isinstance(error, IMAPClientError):
        return "the IMAP server refuses a command: does the folder exist, and may the user write to it?"
    return reason(error)
