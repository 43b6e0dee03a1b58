"""The mail catcher, as a process and over real SMTP."""

import smtplib
import stat

import pytest

from tests.deploy.mail_catching import mail_catcher

MESSAGE = (
    b"From: sender@example.com\r\nTo: jane@example.com\r\nSubject: =?utf-8?q?caf=C3=A9?=\r\n"
    b"\r\nfirst line\r\n.a line that begins with a dot\r\n\r\nlast line\xc3\xa9\r\n"
)


@pytest.fixture(scope="module")
def mails(tmp_path_factory):
    return tmp_path_factory.mktemp("mails")


@pytest.fixture(scope="module")
def port(mails):
    with mail_catcher(mails) as listening:
        yield listening


@pytest.fixture
def files(mails):
    yield mails
    for file in mails.iterdir():
        file.unlink()


def send(port: int, message: bytes) -> None:
    with smtplib.SMTP("127.0.0.1", port, timeout=30) as client:
        client.sendmail("sender@example.com", ["jane@example.com"], message)


def test_accepted_message_is_kept_byte_for_byte(port, files):
    send(port, MESSAGE)

    (file,) = files.iterdir()
    assert file.suffix == ".eml"
    assert file.read_bytes() == MESSAGE


def test_only_its_owner_can_read_the_messages_which_hold_secrets(tmp_path):
    folder = tmp_path / "mails"
    folder.mkdir(mode=0o755)
    with mail_catcher(folder) as port:
        send(port, MESSAGE)

    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
