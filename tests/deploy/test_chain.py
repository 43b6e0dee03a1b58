"""The timeline of `make demo`, and how it reads an e-mail."""

from email.message import EmailMessage
from pathlib import Path

from deploy.local.chain import Timeline, text_of

URL = "https://app.example.com/calculator/request/req_0123456789abcdefghijkl?secret=" + "x" * 43


def test_link_is_found_in_an_e_mail_however_it_is_encoded(tmp_path: Path) -> None:
    for encoding in ("quoted-printable", "base64", "7bit"):
        message = EmailMessage()
        message.set_content(f"Dear Jane,\n{URL}\n", cte=encoding)
        message.add_alternative(f"<a href='{URL}'>link</a>", subtype="html")
        file = tmp_path / f"{encoding}.eml"
        file.write_bytes(message.as_bytes())

        assert URL in text_of(file)


def test_timeline_shows_steps_in_the_order_in_which_they_happened() -> None:
    timeline = Timeline({"published": (0.0251, "event"), "stored": (0.0123, "answered")})

    first, second = timeline.render().splitlines()

    assert first.split() == ["stored", "12.3", "ms", "answered"]
    assert second.split() == ["published", "25.1", "ms", "event"]
    assert first.index("ms") == second.index("ms")
