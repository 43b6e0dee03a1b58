"""A firm's outgoing mail: Postfix, customers' mail servers, and the mailbox that gets the reports."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiosmtplib

from tests.harness import dovecot, postfix
from tests.harness.certificates import Authority
from tests.harness.dovecot import LOGIN, Dovecot
from tests.harness.mail_server import ScriptedMailServer, Session
from tests.harness.postfix import Postfix

MISSING_DOMAIN = "missing.example.net"  # which has no mail server


class CustomersServer(ScriptedMailServer):
    """The mail server of every other domain. It accepts e-mails, unless the recipient has a refusal here."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: dict[str, bytes] = {}  # of RCPT, by address
        self.content_refusals: dict[str, bytes] = {}

    async def reply_to(self, session: Session, command: str, sent: bytes) -> bytes | None:
        refusals = {"RCPT": self.refusals, "content": self.content_refusals}.get(command, {})
        to = sent if command == "RCPT" else session.recipient
        address = to.partition(b"<")[2].partition(b">")[0].decode()
        return refusals.get(address) or await super().reply_to(session, command, sent)


@dataclass(frozen=True)
class MailSystem:
    """Relays what it gets at `smtp_url` to `customers`. Mail for `mail_from` arrives in the mailbox.

    Postfix reports what it cannot deliver. It tries again every second, and reports a delay at once.
    """

    relay: Postfix
    mailbox: Dovecot
    customers: CustomersServer
    mail_from = LOGIN

    @property
    def smtp_url(self) -> str:
        return self.relay.url

    async def send(self, message: bytes, *, sender: str, recipient: str) -> None:
        """Give a message to Postfix, for instance a customer's answer to `mail_from`."""
        await aiosmtplib.send(
            message, sender=sender, recipients=[recipient], hostname="127.0.0.1", port=self.relay.port
        )


@asynccontextmanager
async def running(authority: Authority, **settings: str) -> AsyncIterator[MailSystem]:
    """Run it until the block is left. *settings* are Postfix's. Raises LocalStackError."""
    domain = LOGIN.partition("@")[2]
    async with CustomersServer() as customers:
        routes = f"{{ {MISSING_DOMAIN} = smtp: }} {{ {domain} = virtual: }}"
        usual = {
            "virtual_mailbox_domains": domain,
            "virtual_mailbox_maps": f"inline:{{ {{ {LOGIN} = {postfix.MAILBOX}/ }} }}",
            "transport_maps": f"inline:{{ {routes} {{ * = smtp:[127.0.0.1]:{customers.port} }} }}",
            "smtpd_relay_restrictions": "permit_mynetworks, reject",
            "mynetworks": "127.0.0.0/8",
            "queue_run_delay": "1s",
            "minimal_backoff_time": "1s",
            "maximal_backoff_time": "1s",
            "delay_warning_time": "1s",
            "smtp_connection_cache_on_demand": "no",
        }
        with (
            postfix.running(**(usual | settings)) as relay,
            dovecot.running(authority, relay.folder / postfix.MAILBOX) as mailbox,
        ):
            yield MailSystem(relay, mailbox, customers)
