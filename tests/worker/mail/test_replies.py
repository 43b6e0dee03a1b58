"""Whose fault a mail server's refusal is: the rows of the table on the page, sent by a real server."""

import re

import pytest

from deploy.local.machine.folders import CHECKOUT
from tests.harness.mail_server import ScriptedMailServer
from tests.worker.mail.sending import sending_to
from worker.mail.replies import Reply

PAGE = (CHECKOUT / "worker/README.md").read_text()
ROWS = re.findall(r"^\| (\w+) \| `([45].+)` \| .+ \| (\w+) \|$", PAGE, re.MULTILINE)
COMMANDS = {"connection": "greeting", "STARTTLS": "STAR"}  # as the scripted server names them
LABELS = {
    ("outage", "4"): "given_back",
    ("outage", "5"): "given_back",
    ("recipient", "5"): "failed",
    ("message", "5"): "failed",
}
OFFER = b"250-mail.example.com\r\n250-STARTTLS\r\n250 AUTH PLAIN"


@pytest.mark.parametrize(("at", "reply", "fault"), ROWS)
async def test_refusal_is_final_if_it_is_the_recipients_or_the_messages_fault(*, at, reply, fault):
    async with ScriptedMailServer() as server:
        server.replies["EHLO"] = OFFER
        scheme = {"STARTTLS": "smtp+starttls://", "AUTH": "smtp://us:secret@"}.get(at, "smtp://")
        for command in ("EHLO", "HELO") if at == "EHLO" else (COMMANDS.get(at, at),):
            server.replies[command] = reply.encode()
        async with sending_to(server.url.replace("smtp://", scheme)) as sending:
            outcome = await sending.send()

    assert (outcome.label, outcome.reply) == (LABELS.get((fault, reply[0]), "postponed"), reply)
    assert fault == "outage" or read(at, reply).fault == fault


def read(at: str, reply: str) -> Reply:
    return Reply("RCPT" if at == "RCPT" else "content", int(reply[:3]), reply[4:])


def test_table_has_many_different_rows():
    assert len(set(ROWS)) == len(ROWS) > 50


@pytest.mark.parametrize("word", ["relay", "helo", "sender", "client", "login"])
def test_word_in_a_quoted_address_blames_nobody(word):
    for quoted in (f"<{word}@{word}.example.com>", f"{word}@{word}.example.com"):
        assert Reply("RCPT", 554, f"5.7.1 {quoted}: Recipient address rejected").fault == "recipient"


@pytest.mark.parametrize("at", ["RCPT", "content"])
def test_lost_session_is_passing(at):
    assert {Reply(at, 0).fault, Reply(at, 421, "4.7.0 sender blocked").fault} == {"passing"}
