"""What becomes of an e-mail after each reply of a mail server, and which connections are kept."""

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from service.calculation_requests.email_changes import EmailEnd, EmailId
from tests.harness import stored
from tests.harness.certificates import FAULTS, context_with, faulty_certificate
from tests.harness.mail_server import Login, MailServer
from tests.harness.processes import email_settings
from tests.harness.tcp_proxy import TcpProxy
from worker.mail import replies
from worker.mail.ledger import Email, Outcome, Release
from worker.mail.replies import NO_REPLY, Reply, storable
from worker.mail.smtp import Mailer, MailServerUnavailable, Session

SENDER = "calculations@service.example.com"
CUSTOMER = "ada@customer.example.com"


@asynccontextmanager
async def sending_to(url: str, **changes: Any) -> AsyncIterator[Callable[..., Awaitable[Outcome]]]:
    """Yield a function that sends an e-mail over one connection, as long as possible, as the postman does."""
    mailer = Mailer(email_settings(smtp_url=url, **{"smtp_timeout_seconds": 20.0, **changes}))
    session: Session | None = None

    async def send(content: bytes = b"Subject: a link\r\n\r\nText\r\n") -> Outcome:
        nonlocal session
        try:
            session = session or await mailer.open_session(SENDER)
        except MailServerUnavailable as outage:
            return outcome_of(outage.reply)
        await session.begin()
        reply = await session.name_recipient(CUSTOMER)
        if reply.is_acceptance:
            reply = await session.send(content)
        if not session.is_reusable:
            await session.end()
            session = None
        return outcome_of(reply)

    yield send
    if session is not None:
        await session.end()


def outcome_of(reply: Reply, *, attempts: int = 0, days: float = 0, others_accepted: bool = True) -> Outcome:
    request, added = stored.new_request(), time.monotonic() - days * 24 * 3600
    email = Email(EmailId(request.id, 1, "invitation"), request, "Acme", attempts, None, added, added)
    if reply.to in ("connection", "MAIL"):
        return replies.given_back(email, reply)
    return replies.outcome_of(reply, email, email_settings(), others_accepted=others_accepted)


UNFINISHED = b"250-and so on"  # a reply whose last line never comes
LOST = [None, b"421 Going down", b"nonsense", UNFINISHED]
IMPOSSIBLE = b"354 Go ahead"
WHY = {None: ": the connection was lost", UNFINISHED: ": no answer in time"}
# For each command and reply: the outcome.
OUTCOMES = [
    *product(["RCPT", "content"], [b"550 5.1.1 Empf\xe4nger unbekannt"], ["failed"]),
    # The e-mail may have been accepted, so it is not sent again at once.
    *product(["RCPT", "DATA", "content"], [b"450 Busy", *LOST], ["postponed"]),
    *product(["RCPT", "content"], [IMPOSSIBLE], ["postponed"]),
    ("DATA", b"250 OK", "postponed"),
    *product(["greeting", "EHLO"], [*LOST, IMPOSSIBLE], ["given_back"]),
    *product(["MAIL"], [b"450 Busy", *LOST, IMPOSSIBLE], ["given_back"]),
]


@pytest.mark.parametrize(("command", "answer", "label"), OUTCOMES)
async def test_reply_decides_on_this_email_and_connection_alone(rude_server, *, command, answer, label):
    usual, rude_server.replies[command] = rude_server.replies[command], answer

    seconds = 0.2 if answer in {UNFINISHED, IMPOSSIBLE} else 20.0
    async with sending_to(rude_server.url, smtp_timeout_seconds=seconds) as send:
        outcome = await send()
        rude_server.replies[command] = usual
        assert (await send()).label == "sent"

    assert (outcome.label, rude_server.connections) == (label, 2)
    if answer is not None and answer.startswith((b"4", b"5")):
        assert (outcome.reply, outcome.smtp_code) == (answer.decode(errors="replace"), int(answer[:3]))
    else:
        assert outcome.reply
        assert outcome.reply.endswith(WHY.get(answer, ""))


# The refused command, whose fault it is, the server that replies so, and its reply.
ROWS = [
    [cell.strip() for cell in line.split("|")]
    for line in Path(__file__).with_name("replies.txt").read_text().splitlines()
]
LABELS = {("recipient", "5"): "failed", ("message", "5"): "failed"}
OFFER = b"250-mail.example.com\r\n250-STARTTLS\r\n250 AUTH PLAIN"


@pytest.mark.parametrize(("at", "fault", "_server", "reply"), ROWS)
async def test_refusal_is_final_if_it_blames_recipient_or_message(*, rude_server, at, fault, _server, reply):
    commands = {"connection": ["greeting"], "STARTTLS": ["STAR"], "EHLO": ["EHLO", "HELO"]}.get(at, [at])
    rude_server.replies |= {"EHLO": OFFER, **dict.fromkeys(commands, reply.encode())}
    scheme = {"STARTTLS": "smtp+starttls://", "AUTH": "smtp://us:secret@"}.get(at, "smtp://")
    async with sending_to(rude_server.url.replace("smtp://", scheme)) as send:
        outcome = await send()

    label = "given_back" if fault == "outage" else LABELS.get((fault, reply[0]), "postponed")
    assert (outcome.label, outcome.reply) == (label, reply)
    read = Reply("RCPT" if at == "RCPT" else "content", int(reply[:3]), reply[4:])
    assert fault in ("outage", read.fault)


@pytest.mark.parametrize("word", ["relay", "helo", "sender", "client", "login"])
def test_word_in_a_quoted_address_or_after_421_blames_nobody(word):
    for quoted in (f"<{word}@{word}.example.com>", f"{word}@{word}.example.com"):
        assert Reply("RCPT", 554, f"5.7.1 {quoted}: Recipient address rejected").fault == "recipient"
    assert Reply("content", 421, f"4.7.0 {word} blocked").fault == "passing"


async def test_reply_too_many_is_not_taken_for_the_reply_to_the_next_email(rude_server):
    async with sending_to(rude_server.url) as send:
        rude_server.replies["content"] = b"250 OK\r\n250 OK, says the filter too"
        await send()
        rude_server.replies["content"] = b"554 Spam"
        outcomes = [await send() for _ in range(2)]

    assert [(each.label, each.smtp_code) for each in outcomes] == [("postponed", 0), ("failed", 554)]
    assert (rude_server.connections, len(rude_server.contents)) == (2, 2)


async def test_acceptance_in_any_encoding_is_final(rude_server):
    async with sending_to(rude_server.url) as send:
        for reply in (b"250 OK \xe9", b"250 OK \x00 done", f"250-{LINK[:-9]}\r\n250 {LINK[-9:]}".encode()):
            rude_server.replies["content"] = reply
            outcome = await send()
            assert outcome.label == "sent"
            assert not any(part in str(outcome.reply) for part in ("\0", SECRET[:9], SECRET[-9:]))


async def test_lines_that_begin_with_a_dot_arrive_whole_and_end_no_email(mail_server):
    async with sending_to(mail_server.url) as send:
        await send(b"Subject: dots\r\n\r\n.Law\r\n.\r\nThe end\r\n")

    (mail,) = mail_server.accepted
    assert mail.message.get_content().splitlines() == [".Law", ".", "The end"]


async def test_email_whose_content_is_withheld_leaves_no_recipient_to_the_next_one(mail_server):
    session = await Mailer(email_settings(smtp_url=mail_server.url)).open_session(SENDER)
    await session.name_recipient("withheld@customer.example.com")

    assert not session.is_reusable
    await session.end()


@pytest.mark.parametrize("name", [None, "mail.service.example.com"])
async def test_mail_server_is_greeted_with_the_name_given_or_else_a_domain_or_an_address(rude_server, name):
    written: list[bytes] = []
    async with (
        TcpProxy(rude_server.url, lambda: written.append) as link,
        sending_to(link.url, smtp_helo_name=name) as send,
    ):
        await send()

    greeted = written[0].decode().split()
    assert greeted == ["EHLO", name or greeted[1]]
    assert re.fullmatch(r"\[[0-9.]+\]|[\w-]+(\.[\w-]+)+", greeted[1])  # Postfix accepts no bare name.


@pytest.mark.parametrize("required", ["smtp+starttls://", "smtps://", "smtp://user:hunter2@"])
async def test_mail_server_without_the_required_encryption_or_login_is_unavailable(rude_server, required):
    url = rude_server.url.replace("smtp://", required)

    async with sending_to(url, smtp_timeout_seconds=0.5) as send:
        assert (await send()).label == "given_back"

    assert rude_server.contents == []


ENCRYPTED = pytest.mark.parametrize("scheme", ["smtp+starttls", "smtps"])
LOGIN = Login("sender@service.example.com", "pass/word: é@?#%41")


@ENCRYPTED
async def test_email_is_sent_encrypted_after_a_login(scheme, authority):
    context = authority.server_context()
    async with MailServer(scheme, context, LOGIN) as server, sending_to(server.url) as send:
        await send()
        await send()

    assert [mail.recipients for mail in server.accepted] == [[CUSTOMER]] * 2
    assert server.logins == 1


@ENCRYPTED
@pytest.mark.parametrize(
    ("fault", "login"),
    [*((fault, LOGIN) for fault in FAULTS), (None, None), (None, Login(LOGIN.name, "hunter2"))],
)
async def test_untrusted_server_or_refused_login_gets_no_email(scheme, fault, login, authority, tmp_path):
    certificate = faulty_certificate(fault, authority, tmp_path) if fault else authority.certificate()
    server = MailServer(scheme, context_with(certificate), LOGIN)
    async with server, sending_to(server.url_for(login)) as send:
        assert (await send()).label == "given_back"

    assert (server.logins, server.accepted) == (0, [])


def test_pauses_between_attempts_double_up_to_half_an_hour():
    busy = Reply("RCPT", 451, "Not now")
    outcomes = [outcome_of(busy, attempts=attempts) for attempts in (*range(8), 1024)]

    seconds = [each.seconds for each in outcomes if isinstance(each, Release)]
    assert seconds == [30, 60, 120, 240, 480, 960, 1800, 1800, 1800]


@pytest.mark.parametrize(
    ("reply", "others_accepted", "before", "after"),
    [
        (Reply("RCPT", 451, "4.3.0 Try again"), False, "postponed", "failed"),
        (Reply("content", NO_REPLY), False, "postponed", "failed"),
        (Reply("RCPT", 454, "4.7.1 Relay access denied"), True, "postponed", "failed"),
        (Reply("RCPT", 554, "5.7.1 Relay access denied"), True, "postponed", "failed"),
        (Reply("RCPT", 554, "5.7.1 Relay access denied"), False, "postponed", "postponed"),
        (Reply("content", 454, "Throttling failure"), True, "postponed", "failed"),
        (Reply("content", 454, "Throttling failure"), False, "postponed", "postponed"),
    ],
)
def test_email_that_alone_is_refused_is_given_up_after_five_days(reply, *, others_accepted, before, after):
    ends = [
        outcome_of(reply, attempts=attempts, days=days, others_accepted=others_accepted)
        for days, attempts in ((4.99, 9), (5.01, 9), (5.01, 0))  # the last one after a long outage
    ]

    assert [end.label for end in ends] == [before, after, "postponed"]
    assert ends[1].smtp_code == reply.code
    assert {end.reason for end in ends if isinstance(end, EmailEnd)} <= {"gave_up"}


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
def test_secret_is_removed_however_a_reply_quotes_it_and_where_a_long_one_is_cut(quoted):
    end = f" ({'.' * 60}) see https://example.com/why, id 1.2"
    short = storable(f"5.7.1 Spam: {quoted}{end}")
    long = [storable(f"{'.' * length} {quoted} {'.' * 1000}") for length in range(850, 1001)]

    assert (short[:12], short[-len(end) :]) == ("5.7.1 Spam: ", end)
    assert max(map(len, long)) <= 1000
    parts = [SECRET[start : start + 4] for start in range(len(SECRET) - 3)]
    assert not any(part in text for text in (short, *long) for part in parts)


async def test_secret_that_the_mail_server_quotes_is_not_in_the_reply_that_is_stored(rude_server):
    for command, code in {"content": 451, "RCPT": 550, "MAIL": 550, "greeting": 421}.items():
        rude_server.replies[command] = f"{code}-{LINK[:-9]}\r\n{code} {LINK[-9:]}".encode()
        async with sending_to(rude_server.url) as send:
            reply = (await send()).reply

        assert reply is not None
        parts = ("https://sdlt.example.com", SECRET[:9], SECRET[-9:])
        assert [part in reply for part in parts] == [True, False, False]
