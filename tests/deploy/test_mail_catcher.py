"""The mail catcher, as a process and over real SMTP."""

import smtplib
import stat

from tests.deploy.mail_catching import mail_catcher

MESSAGE = (
    b"From: sender@example.com\r\nTo: jane@example.com\r\nSubject: =?utf-8?q?caf=C3=A9?=\r\n"
    b"\r\nfirst line\r\n.a line that begins with a dot\r\n\r\nlast line\xc3\xa9\r\n"
)


def test_accepted_message_is_kept_byte_for_byte_and_only_its_owner_can_read_it(tmp_path):
    folder = tmp_path / "mails"
    folder.mkdir(mode=0o755)
    with mail_catcher(folder) as port, smtplib.SMTP("127.0.0.1", port, timeout=30) as client:
        client.sendmail("sender@example.com", ["jane@example.com"], MESSAGE)

    (file,) = folder.glob("*.eml")
    assert file.read_bytes() == MESSAGE
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
