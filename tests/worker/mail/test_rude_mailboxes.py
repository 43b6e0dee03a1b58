"""IMAP servers and token servers that break the rules: they delay no stop, and take no memory."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.harness.loopback_server import LoopbackServer
from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually
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
_FLOOD_BYTES = 300_000_000


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


async def _flood(writer: asyncio.StreamWriter, head: bytes, chunk: bytes) -> None:
    writer.write(head)
    for _ in range(_FLOOD_BYTES // len(chunk)):
        writer.write(chunk)
        await writer.drain()
    await asyncio.Event().wait()


async def send_endless_literal(writer: asyncio.StreamWriter, _tag: bytes) -> None:
    await _flood(writer, b"* 1 FETCH (UID 1 BODY[]<0> {4000000000}\r\n", bytes(100_000))


async def send_endless_lines(writer: asyncio.StreamWriter, _tag: bytes) -> None:
    await _flood(writer, b"", (b"* 1 FETCH (FLAGS (" + b"x" * 100_000 + b"))\r\n"))


async def close_in_literal(writer: asyncio.StreamWriter, _tag: bytes) -> None:
    writer.write(b"* 1 FETCH (UID 1 BODY[]<0> {500}\r\nhello")
    writer.close()


async def refuse(writer: asyncio.StreamWriter, tag: bytes) -> None:
    writer.write(tag + b" NO The message is damaged.\r\n")


async def test_message_that_cannot_be_read_delays_no_other(worker_settings):
    async with RudeMailbox(b"FETCH 2", refuse) as server:
        settings = settings_with(worker_settings, bounces_url=f"imap://user:word@127.0.0.1:{server.port}")
        async with open_reader(settings) as reader:
            await reader.look()

    assert server.commands[-1].endswith(b"UID STORE 1 +FLAGS.SILENT (\\Flagged)\r\n")


@pytest.mark.parametrize("step", [b"greeting", b"FETCH"])
async def test_look_into_the_mailbox_of_a_slow_server_ends_in_time(monkeypatch, worker_settings, step):
    monkeypatch.setattr(mailbox, "_LONGEST_LOOK_SECONDS", 1.0)

    async with RudeMailbox(step, drip) as slow, asyncio.timeout(15):
        settings = settings_with(worker_settings, bounces_url=f"imap://user:word@127.0.0.1:{slow.port}")
        async with open_reader(settings) as reader:
            with pytest.raises(mailbox.MailboxUnavailable, match="the connection was lost"):
                await reader.look()


@pytest.mark.parametrize(
    ("step", "rudeness"),
    [
        (b"greeting", drip),
        (b"SEARCH", drip),
        (b"SEARCH", send_endless_lines),
        (b"FETCH", send_endless_literal),
        (b"FETCH", close_in_literal),
    ],
)
async def test_rude_imap_server_takes_no_memory_and_delays_no_stop(worker_settings, tmp_path, step, rudeness):
    begun = asyncio.Event()

    async def be_rude(writer: asyncio.StreamWriter, tag: bytes) -> None:
        begun.set()
        await rudeness(writer, tag)

    async with RudeMailbox(step, be_rude) as server:
        url = f"imap://user:word@127.0.0.1:{server.port}"
        worker = worker_process(worker_settings, tmp_path, BOUNCES_URL=url, BOUNCES_POLL_SECONDS="1")
        async with started(worker):
            before = worker.peak_megabytes()
            await eventually(begun.is_set)
            if rudeness is not drip:
                await eventually(lambda: "bounces_not_read" in worker.output, seconds=20)
                assert ("sends too much" in worker.output) == (rudeness is not close_in_literal)
            grown = worker.peak_megabytes() - before
            began = time.monotonic()
            assert await worker.stop() == 0

    assert time.monotonic() - began < 10
    assert grown < 100
