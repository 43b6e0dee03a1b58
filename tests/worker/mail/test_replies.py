"""Whose fault a mail server's refusal is: the rows of replies.txt, sent by a real server."""

from pathlib import Path
from urllib.parse import quote

import pytest

from tests.harness.mail_server import ScriptedMailServer
from tests.worker.mail.sending import sending_to
from worker.mail.replies import Reply, storable

# The refused command, whose fault it is, the server that replies so, and its reply.
ROWS = [
    [cell.strip() for cell in line.split("|")]
    for line in Path(__file__).with_name("replies.txt").read_text().splitlines()
]
COMMANDS = {"connection": "greeting", "STARTTLS": "STAR"}  # as the scripted server names them
LABELS = {
    ("outage", "4"): "given_back",
    ("outage", "5"): "given_back",
    ("recipient", "5"): "failed",
    ("message", "5"): "failed",
}
OFFER = b"250-mail.example.com\r\n250-STARTTLS\r\n250 AUTH PLAIN"


@pytest.mark.parametrize(("at", "fault", "_server", "reply"), ROWS)
async def test_refusal_is_final_if_it_is_the_recipients_or_the_messages_fault(*, at, fault, _server, reply):
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


@pytest.mark.parametrize("word", ["relay", "helo", "sender", "client", "login"])
def test_word_in_a_quoted_address_blames_nobody(word):
    for quoted in (f"<{word}@{word}.example.com>", f"{word}@{word}.example.com"):
        assert Reply("RCPT", 554, f"5.7.1 {quoted}: Recipient address rejected").fault == "recipient"


@pytest.mark.parametrize("at", ["RCPT", "content"])
def test_lost_session_is_passing(at):
    assert {Reply(at, 0).fault, Reply(at, 421, "4.7.0 sender blocked").fault} == {"passing"}


SECRET = "3D-vQ_x-A7kE9mN2pR4tY6uI8oL0sD1fG3hJ5zX7cV9"
LINK = f"https://sdlt.example.com/calculator/request/req_1?secret={SECRET}"
QUOTED = {
    "whole": LINK,
    "cut off": LINK[:-9],
    "in two lines": f"{LINK[:-9]}\n{LINK[-9:]}",
    "in two lines with a code": f"{LINK[:-9]}\n5.7.1 {LINK[-9:]}",
    "folded": f"{LINK[:-9]}\n {LINK[-9:]}",
    "quoted-printable": f"{LINK[:-9]}=\n{LINK[-9:]}".replace("secret=", "sec=\nret=3D"),
    "all bytes quoted": LINK.replace("=", "=3D").replace("-", "=2D").replace("_", "=5F"),
    "percent-encoded": quote(LINK, safe=""),
    "percent-encoded twice": quote(quote(LINK, safe="").replace("-", "%2D").replace("_", "%5f"), safe=""),
    "without its link": f"token '{SECRET}' is unknown",
}


@pytest.mark.parametrize("quoted", QUOTED.values(), ids=QUOTED)
def test_secret_is_removed_however_a_reply_quotes_it(quoted):
    stored = storable(f"5.7.1 Spam: {quoted} ({'.' * 60}) see https://example.com/why, id 1.2")

    assert not shows_secret(stored)
    assert stored.startswith("5.7.1 Spam: ")
    assert stored.endswith(f"({'.' * 60}) see https://example.com/why, id 1.2")


@pytest.mark.parametrize("quoted", QUOTED.values(), ids=QUOTED)
def test_secret_is_removed_where_a_long_reply_is_cut(quoted):
    for length in range(850, 1001):
        stored = storable(f"{'.' * length} {quoted} {'.' * 1000}")

        assert len(stored) <= 1000
        assert not shows_secret(stored)


def shows_secret(stored: str) -> bool:
    return any(SECRET[start : start + 4] in stored for start in range(len(SECRET) - 3))
