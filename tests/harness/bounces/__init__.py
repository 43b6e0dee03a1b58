"""Reports of e-mails that were not delivered, and one e-mail of ours, with {TOKEN} in place of its token.

Those named `postfix_…` are Postfix 3.7's. The others are written after public documents and reports, with
made-up names, and shortened:

- `exchange_online`: codes of Microsoft's page on non-delivery reports in Exchange Online, and the form of
  reports in the tests of two libraries, Sisimai and MailBounceDetector.
- `gmail`: the form of reports on public mailing lists. Parts in parts, and the returned e-mail is cut off.
- `exim`: the form of reports on public mailing lists.
- `amazon_ses`: Amazon's page on header fields, which says that Message-ID and Date are replaced, and the form
  of reports in Sisimai's tests. A comment follows the status.
- `out_of_office`: the reply of a customer's mailbox (RFC 3834). It is no report, but has the token.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent
TOKEN = "{TOKEN}"
NAMES = sorted(file.stem for file in _FOLDER.glob("*.eml"))


def message(name: str, token: str = TOKEN) -> bytes:
    """Return a message as it comes by SMTP or IMAP, with *token* in place of {TOKEN}."""
    text = (_FOLDER / f"{name}.eml").read_text()
    return text.replace(TOKEN, token).replace("\n", "\r\n").encode()
