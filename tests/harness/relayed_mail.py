"""A firm's outgoing mail: Postfix, customers' mail servers, and the mailbox that gets the reports."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
        if command == "RCPT":
            return self.refusals.get(_address(sent), self.replies["RCPT"])
        if command == "content":
            return self.content_refusals.get(_address(session.recipient), self.replies["content"])
        return await super().reply_to(session, command, sent)


def _address(command: bytes) -> str:
    return command.partition(b"<")[2].partition(b">")[0].decode()


class MailSystem:
    """Relays what it gets at `smtp_url` to `customers`. Mail for `mail_from` arrives in the mailbox.

    Postfix reports what it cannot deliver. It tries again every second, and reports a delay at once.
    """

    mail_from = LOGIN

    def __init__(self, relay: Postfix, mailbox: Dovecot, customers: CustomersServer) -> None:
        self.relay = relay
        self.mailbox = mailbox
        self.customers = customers
        self.smtp_url = relay.url

    async def send(self, message: bytes, *, sender: str, recipient: str) -> None:
        """Give a message to Postfix, for instance a customer's answer to `mail_from`."""
        async with aiosmtplib.SMTP(hostname="127.0.0.1", port=self.relay.port) as connection:
            await connection.sendmail(sender, [recipient], message)


@asynccontextmanager
async def running(authority: Authority) -> AsyncIterator[MailSystem]:
    """Run it until the block is left. Raises LocalStackError."""
    domain = LOGIN.partition("@")[2]
    async with CustomersServer() as customers:
        routes = f"{{ {MISSING_DOMAIN} = smtp: }} {{ {domain} = virtual: }}"
        settings = {
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
            postfix.running(**settings) as relay,
            dovecot.running(authority, relay.folder / postfix.MAILBOX) as mailbox,
        ):
            yield MailSystem(relay, mailbox, customers)
