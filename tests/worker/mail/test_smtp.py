"""What becomes of an e-mail after each reply of a mail server, and which connections are kept."""

import re
from datetime import timedelta
from itertools import product

import pytest

from service.calculation_requests.email_changes import EmailEnd
from tests.harness.certificates import FAULTS, faulty_context
from tests.harness.mail_server import Login, MailServer
from tests.harness.processes import email_settings
from tests.harness.tcp_proxy import TcpProxy
from tests.worker.mail.composing import SENDER
from tests.worker.mail.sending import outcome_of, sending_to
from worker.mail.ledger import Release
from worker.mail.replies import NO_REPLY, Reply
from worker.mail.smtp import Mailer

UNFINISHED = b"250-and so on"  # a reply whose last line never comes


REFUSED = [b"550 5.1.1 No such user", b"550 5.1.1 Empf\xe4nger unbekannt"]
BUSY = [b"450 Busy", b"451 4.7.1 Greylisted"]
BLAMING_US = [b"454 4.7.1 Relay access denied", b"432 Sender thread limit exceeded"]
LOST = [None, b"421 Going down", b"nonsense", UNFINISHED]
IMPOSSIBLE = b"354 Go ahead"
WHY = {None: ": the connection was lost", UNFINISHED: ": no answer in time"}

# For each command and reply: the outcome.
OUTCOMES = [
    *product(["RCPT", "content"], REFUSED, ["failed"]),
    *product(["RCPT", "DATA", "content"], [*BUSY, *BLAMING_US], ["postponed"]),
    # The e-mail may have been accepted, so it is not sent again at once.
    *product(["RCPT", "DATA", "content"], LOST, ["postponed"]),
    *product(["RCPT", "content"], [IMPOSSIBLE], ["postponed"]),
    ("DATA", b"250 OK", "postponed"),
    *product(["greeting", "EHLO"], [*LOST, IMPOSSIBLE], ["given_back"]),
    *product(["MAIL"], [*REFUSED, *BUSY, *BLAMING_US, *LOST, IMPOSSIBLE], ["given_back"]),
]


@pytest.mark.parametrize(("command", "answer", "label"), OUTCOMES)
async def test_reply_decides_on_this_email_alone_and_the_next_takes_a_new_connection(
    rude_server, *, command, answer, label
):
    usual, rude_server.replies[command] = rude_server.replies[command], answer

    seconds = 0.2 if answer in {UNFINISHED, IMPOSSIBLE} else 20.0
    async with sending_to(rude_server.url, smtp_timeout_seconds=seconds) as sending:
        outcome = await sending.send()
        rude_server.replies[command] = usual
        next_outcome = await sending.send()

    assert (outcome.label, next_outcome.label) == (label, "sent")
    assert rude_server.connections == 2
    if answer is not None and answer.startswith((b"4", b"5")):
        words = answer.decode(errors="replace")
        assert (outcome.reply, outcome.smtp_code) == (words, int(answer[:3]))
    else:
        assert outcome.reply
        assert outcome.reply.endswith(WHY.get(answer, ""))


async def test_reply_too_many_is_not_taken_for_the_reply_to_the_next_email(rude_server):
    async with sending_to(rude_server.url) as sending:
        rude_server.replies["content"] = b"250 OK\r\n250 OK, says the filter too"
        await sending.send()
        rude_server.replies["content"] = b"554 Spam"
        outcomes = [await sending.send() for _ in range(2)]

    assert [(each.label, each.smtp_code) for each in outcomes] == [("postponed", 0), ("failed", 554)]
    assert (rude_server.connections, len(rude_server.contents)) == (2, 2)


async def test_lines_that_begin_with_a_dot_arrive_whole_and_end_no_email(mail_server):
    content = b"Subject: dots\r\n\r\n.Law\r\n.\r\nThe end\r\n"
    async with sending_to(mail_server.url) as sending:
        await sending.send(content)

    (mail,) = mail_server.accepted
    assert mail.message.get_content().splitlines() == [".Law", ".", "The end"]


async def test_email_whose_content_is_withheld_leaves_no_recipient_to_the_next_one(mail_server):
    session = await Mailer(email_settings(smtp_url=mail_server.url)).open_session(SENDER.address)
    await session.name_recipient("withheld@customer.example.com")

    assert not session.is_reusable
    await session.end()


@pytest.mark.parametrize("name", [None, "mail.service.example.com"])
async def test_mail_server_is_greeted_with_the_name_given_or_else_a_domain_or_an_address(rude_server, name):
    written: list[bytes] = []
    async with (
        TcpProxy(rude_server.url, lambda: written.append) as link,
        sending_to(link.url, smtp_helo_name=name) as sending,
    ):
        await sending.send()

    greeted = written[0].decode().split()
    assert greeted == ["EHLO", name or greeted[1]]
    assert re.fullmatch(r"\[[0-9.]+\]|[\w-]+(\.[\w-]+)+", greeted[1])  # Postfix accepts no bare name.


@pytest.mark.parametrize("required", ["smtp+starttls://", "smtps://", "smtp://user:hunter2@"])
async def test_mail_server_without_the_required_encryption_or_login_is_unavailable(rude_server, required):
    url = rude_server.url.replace("smtp://", required)

    async with sending_to(url, smtp_timeout_seconds=0.5) as sending:
        assert (await sending.send()).label == "given_back"

    assert rude_server.contents == []


ENCRYPTED = ["smtp+starttls", "smtps"]

LOGIN = Login("sender@service.example.com", "pass/word: é@?#%41")


@pytest.mark.parametrize("scheme", ENCRYPTED)
async def test_email_is_sent_encrypted_after_a_login(scheme, authority):
    async with (
        MailServer(scheme, authority.server_context(), LOGIN) as server,
        sending_to(server.url) as sending,
    ):
        await sending.send()
        await sending.send()

    assert [mail.recipients for mail in server.accepted] == [["ada@customer.example.com"]] * 2
    assert server.logins == 1


@pytest.mark.parametrize("scheme", ENCRYPTED)
@pytest.mark.parametrize(
    ("fault", "login"),
    [*((fault, LOGIN) for fault in FAULTS), (None, None), (None, Login(LOGIN.name, "hunter2"))],
)
async def test_untrusted_server_or_refused_login_gets_no_email(scheme, fault, login, authority, tmp_path):
    context = faulty_context(fault, authority, tmp_path) if fault else authority.server_context()
    async with MailServer(scheme, context, LOGIN) as server, sending_to(server.url_for(login)) as sending:
        assert (await sending.send()).label == "given_back"

    assert (server.logins, server.accepted) == (0, [])


def test_pauses_between_attempts_double_up_to_half_an_hour():
    outcomes = [
        outcome_of(Reply("RCPT", 451, "Not now"), attempts=attempts) for attempts in (*range(8), 1024)
    ]

    assert [each.seconds for each in outcomes if isinstance(each, Release)] == [
        *(30, 60, 120, 240, 480, 960, 1800, 1800, 1800)
    ]


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
    day_5 = timedelta(days=5)

    ends = [
        outcome_of(
            reply, attempts=attempts, age=day_5 + timedelta(minutes=late), others_accepted=others_accepted
        )
        for late, attempts in ((-1, 9), (1, 9), (1, 0))
    ]

    assert [end.label for end in ends] == [before, after, "postponed"]  # the last one after a long outage
    assert ends[1].smtp_code == reply.code
    assert {end.reason for end in ends if isinstance(end, EmailEnd)} <= {"gave_up"}
