"""IMAP servers that break the rules: a look ends in time, and takes little memory."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.harness.loopback_server import LoopbackServer
from tests.worker.conftest import settings_with
from tests.worker.mail.conftest import open_reader
from worker.mail import mailbox

Rudeness = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]  # with the tag of the command

_ANSWERS = {
    b"greeting": b"* OK ready\r\n",
    b"CAPABILITY": b"* CAPABILITY IMAP4rev1 UIDPLUS AUTH=PLAIN\r\n",
    b"LOGIN": b"",
    b"AUTHENTICATE": b"",
    b"SELECT": b"* 1 EXISTS\r\n",
    b"SEARCH": b"* SEARCH 1 2\r\n",
    b"FETCH": b'* 1 FETCH (UID 1 INTERNALDATE "28-Nov-2026 09:00:00 +0000" BODY[]<0> {5}\r\nhello)\r\n',
    b"STORE": b"",
    b"EXPUNGE": b"",
}


class RudeMailbox(LoopbackServer):
    """An IMAP server with two messages. It is rude whenever it is asked for *step*."""

    def __init__(self, step: bytes, rudeness: Rudeness) -> None:
        super().__init__()
        self._step = step
        self._rudeness = rudeness
        self.commands: list[bytes] = []

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client."""
        line = b"* greeting"
        while line:
            self.commands.append(line)
            tag, *words = line.split()
            command = next(word for word in words if word in _ANSWERS)
            if self._step in line:
                await self._rudeness(writer, tag)
            else:
                if command == b"AUTHENTICATE":
                    writer.write(b"+ \r\n")
                    await reader.readline()
                writer.write(_ANSWERS[command] + (tag + b" OK done\r\n" if tag != b"*" else b""))
            line = await reader.readline()


async def drip(writer: asyncio.StreamWriter, _tag: bytes) -> None:
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.2)


async def send_without_end(writer: asyncio.StreamWriter, _tag: bytes) -> None:
    for _ in range(3_000):  # 300 MB
        writer.write(b"* 1 FETCH (FLAGS (" + b"x" * 100_000 + b"))\r\n")
        await writer.drain()
    await asyncio.Event().wait()


async def announce_four_gigabytes(writer: asyncio.StreamWriter, _tag: bytes) -> None:
    writer.write(b"* 1 FETCH (UID 1 BODY[]<0> {4000000000}\r\n" + bytes(100_000))


async def refuse(writer: asyncio.StreamWriter, tag: bytes) -> None:
    writer.write(tag + b" NO The message is damaged.\r\n")


async def test_message_that_cannot_be_read_delays_no_other(worker_settings):
    async with RudeMailbox(b"FETCH 2", refuse) as server:
        settings = settings_with(worker_settings, bounces_url=f"imap://user:word@127.0.0.1:{server.port}")
        async with open_reader(settings) as reader:
            await reader.look()

    assert server.commands[-1].endswith(b"UID STORE 1 +FLAGS.SILENT (\\Flagged)\r\n")


@pytest.mark.parametrize(
    ("step", "rudeness", "reason"),
    [
        (b"greeting", drip, "the connection was lost"),
        (b"FETCH", drip, "the connection was lost"),
        # As imaplib's errors are explained.
        (b"SEARCH", send_without_end, "sends too much"),
        (b"FETCH", announce_four_gigabytes, "sends too much"),
    ],
)
async def test_look_ends_in_time_with_little_read(monkeypatch, worker_settings, step, rudeness, reason):
    if rudeness is drip:
        monkeypatch.setattr(mailbox, "_LONGEST_LOOK_SECONDS", 1.0)

    async with RudeMailbox(step, rudeness) as rude, asyncio.timeout(15):
        settings = settings_with(worker_settings, bounces_url=f"imap://user:word@127.0.0.1:{rude.port}")
        async with open_reader(settings) as reader:
            with pytest.raises(mailbox.MailboxUnavailable, match=reason):
                await reader.look()
