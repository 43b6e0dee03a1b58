"""What a mail server's report says about an e-mail of ours."""

import base64
import re
import time

import pytest

from service.calculation_requests.email_changes import EmailId
from service.calculation_requests.request_secrets import SecretKeyRing
from service.identifiers import new_request_id
from tests.harness import bounces
from worker.mail import reports, tokens
from worker.mail.replies import Reply

OLD_KEY, KEY, OTHER_KEY = (f"{name}:{letter * 43}" for name, letter in (("1", "A"), ("2", "B"), ("3", "C")))
KEYS = SecretKeyRing.parse(f"{KEY},{OLD_KEY}")
EMAIL = EmailId(new_request_id(), 12, "invitation")
TOKEN = tokens.make(EMAIL, KEYS, key_id=KEYS.current_id)

REPORTS = {
    "postfix_unknown_user": ("recipient", 550, "5.1.1 <[address]>"),
    "postfix_full_mailbox": ("recipient", 552, "5.2.2 "),
    "postfix_missing_domain": ("recipient", 0, "5.4.4 Host or domain name not found. Name service error for"),
    "postfix_refused_content": ("sender", 550, "5.7.1 Message rejected as spam"),
    "postfix_headers_alone": ("sender", 550, "5.7.1 Message rejected as spam"),
    "postfix_expired": ("recipient", 451, "4.7.1 Greylisted, try again in five minutes"),
    "exchange_online": ("recipient", 550, "5.4.1 Recipient address rejected: Access denied."),
    "gmail": ("recipient", 550, "5.1.1 <[address]>: user unknown"),
    "exim": ("recipient", 550, "5.1.1 <[address]>: user unknown"),
    "amazon_ses": ("recipient", 550, "5.1.1 <[address]>: user unknown"),
}


@pytest.mark.parametrize("name", bounces.NAMES)
def test_failure_is_read_with_its_reply_and_whose_fault_it_is(name):
    read = reports.read(bounces.message(name, token=TOKEN), KEYS)

    if name in REPORTS:
        assert read is not None
        assert read.failure is not None
        fault, code, text = REPORTS[name]
        assert (read.email, read.failure.code, read.failure.text[: len(text)]) == (EMAIL, code, text)
        assert reports.blames_us(read.failure) == (fault == "sender")
        assert "@" not in read.failure.text
    else:
        assert read == {"postfix_delay": reports.Report(EMAIL, None)}.get(name)


def test_token_counts_if_it_has_a_known_key_in_quoted_printable_and_in_either_header():
    source, token = bounces.message("postfix_headers_alone", token=TOKEN), TOKEN.encode()
    rings = map(SecretKeyRing.parse, (OLD_KEY, OTHER_KEY))
    old, others = (tokens.make(EMAIL, ring, key_id=ring.current_id) for ring in rings)
    forged = (others, TOKEN.replace(".12.", ".13."), TOKEN[:-1])
    counting = [
        source.replace(token, old.encode()),
        source.replace(token, token[:40] + b"=\r\n" + token[40:]),
        source.replace(b"<" + token + b"@", b"<1@", 1),
        re.sub(rb"(?m)^Calculation-Request-Email: .*\r\n", b"", source),
    ]

    found = [reports.read(each, KEYS) for each in counting]

    assert [each and each.email for each in found] == [EMAIL] * 4
    assert [reports.read(source.replace(token, each.encode()), KEYS) for each in forged] == [None] * 3


STATUSES = "Content-Type: multipart/report; boundary=b\r\n\r\n--b\r\n"
STATUSES += "Content-Type: message/delivery-status\r\n\r\n"


def statuses(*blocks: str) -> bytes:
    parts = "".join(f"{block}\r\n\r\n" for block in blocks)
    return f"{STATUSES}{parts}--b\r\n\r\nMessage-ID: <{TOKEN}@service.example.com>\r\n--b--\r\n".encode()


FAILED = "Action: failed\r\nStatus: 5.1.1\r\nDiagnostic-Code: smtp; 550 5.1.1 no\r\n"
FORWARDED = b"Content-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\nContent-Type: message/rfc822\r\n\r\n"
IN_BASE64 = f"Content-Transfer-Encoding: base64\r\n\r\n{base64.b64encode(FAILED.encode()).decode()}"
WORDS = f"""X-Failed-Recipients: ada@customer.example.com

  ada@customer.example.com
    host mx.customer.example.com [192.0.2.25]: 550 5.1.1 no

------ This is a copy of the message, including all the headers. ------

Message-ID: <{TOKEN}@service.example.com>
"""


@pytest.mark.parametrize(
    ("content", "is_understood"),
    [
        (statuses("Reporting-MTA: dns; a", FAILED).replace(b"\r\n", b"\n"), True),
        # One recipient of many to whom the e-mail was forwarded.
        (statuses(*["Action: delivered\r\nStatus: 2.1.5", "Action: delayed"] * 500, FAILED), True),
        (statuses(FAILED).replace(b"Message-ID: ", b"Message-ID:\r\n "), True),
        (FORWARDED + statuses(FAILED), True),
        (WORDS.encode(), True),  # Exim before 4.85
        (WORDS.replace("X-Failed-Recipients", "To").encode(), False),
        (statuses(FAILED.replace("failed", "relayed")), False),
        (statuses(FAILED).replace(b"status\r\n\r\n", f"status\r\n{IN_BASE64}".encode()), False),
        (statuses(FAILED).replace(b"delivery-status", b"delivery-status; charset=x-none"), True),
        (statuses(FAILED).replace(TOKEN.encode(), base64.b64encode(TOKEN.encode())), False),
    ],
)
def test_form_of_a_report_is_understood_or_left_to_people(content, is_understood):
    expected = reports.Report(EMAIL, Reply("content", 550, "5.1.1 no")) if is_understood else None

    assert reports.read(content, KEYS) == expected


@pytest.mark.parametrize(
    ("fields", "reply"),
    [
        ("", (0, "no reason given")),
        ("Diagnostic-Code: SMTP;550 5.1.10 Unknown; see admin", (550, "5.1.10 Unknown; see admin")),
        ("Status: 5.1.1\r\nDiagnostic-Code: smtp; 554 no", (554, "5.1.1 no")),
        ("Diagnostic-Code: x-unix; 550 is no code of SMTP", (0, "550 is no code of SMTP")),
        ("Diagnostic-Code: smtp; \x00\xff", (0, "���")),
        (f"Diagnostic-Code: smtp; 550 https://a.uk/?secret={'x' * 43}", (550, "https://a.uk/?[secret]")),
        ("Diagnostic-Code: smtp; 550 " + "x " * 2000, (550, ("x " * 2000)[:1000])),
    ],
)
def test_status_and_diagnostic_become_one_reply(fields, reply):
    read = reports.read(statuses("Reporting-MTA: dns; a", f"Action: Failed\r\n{fields}".strip()), KEYS)

    assert read == reports.Report(EMAIL, Reply("content", *reply))


def test_policy_of_the_recipients_server_blames_us():
    for code in ("5.7.1", "5.7.0", "5.7.26", "5.7.27", "5.7.509", "5.7.606"):
        assert reports.blames_us(Reply("content", 550, f"{code} no"))
        assert reports.blames_us(Reply("content", 0, f"{code} no"))


NESTED = [f"Content-Type: multipart/mixed; boundary={n}\r\n\r\n--{n}\r\n" for n in range(900)]
HOSTILE = {
    "deep parts": "".join(NESTED) + "x\r\n" * 100_000,
    "deep messages": "Content-Type: message/rfc822\r\n\r\n" * 8_000,
    "many headers": "A: b\r\n" * 40_000,
    "long word": f"{STATUSES}Action: failed\r\nDiagnostic-Code: {'x' * 200_000}\r\n\r\n",
    "many tokens": f"{TOKEN[:-1]}x\r\n" * 100_000,
    "ten megabytes": "".join(NESTED[:30]) + "x\r\n" * 3_500_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_message_is_read_in_little_time(name):
    content = f"To: <{TOKEN}>\r\n{HOSTILE[name]}".encode("latin-1")
    began = time.process_time()

    read = reports.read(content, KEYS)

    assert time.process_time() - began < 2
    assert read is None or read.failure is None or read.failure.code == 0
