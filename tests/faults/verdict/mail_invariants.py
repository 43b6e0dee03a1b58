"""The invariants about recipients, and about the mail server's connections and replies."""

from collections import defaultdict
from collections.abc import Iterable

from tests.faults.verdict.records import Record

_MOST_MAIL_CONNECTIONS = 32  # two senders with eight, each of which may be closing as many


def no_secret_stored(record: Record) -> Iterable[str]:
    """The secret of a link that the mail server quotes is not stored with its reply."""
    for event in record.secrets_stored:
        yield f"the reply to {event} contains a secret"


def mail_connections_bounded(record: Record) -> Iterable[str]:
    """Connections on which the mail server takes no e-mail are closed."""
    if record.mail_connections > _MOST_MAIL_CONNECTIONS:
        yield f"{record.mail_connections} connections to the mail server"


def emails_reach_their_recipient(record: Record) -> Iterable[str]:
    """Each e-mail goes to the customer of the request in its Message-ID, always under one id."""
    recipients = {request.uuid: request.recipient for request in record.stored}
    for acceptance in record.acceptances:
        expected = recipients.get(uuid_in(acceptance.message_id))
        if acceptance.recipient != expected:
            yield f"{acceptance.message_id} went to {acceptance.recipient}, not to {expected}"
    ids = defaultdict(set)
    for acceptance in record.acceptances:
        ids[acceptance.recipient].add(acceptance.message_id)
    for recipient, used in ids.items():
        if len(used) > 1:
            yield f"{recipient} got e-mails with different ids: {sorted(used)}"


def uuid_in(message_id: str) -> str:
    """Return the uuid of the request that a Message-ID names."""
    return message_id.partition(".")[0]
