"""Debian's Postfix on a free port of the loopback: with its customers' mailbox, or as a firm's relay."""

import os
import pwd
import re
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import aiosmtplib
import pytest

from deploy.local.machine import packages
from deploy.local.machine.ports import free_port
from tests.harness.certificates import Authority
from tests.harness.dovecot import LOGIN, Dovecot
from tests.harness.mail_server import ScriptedMailServer, Session
from tests.harness.programs import configuration, debian_package
from tests.harness.servers import MailDaemon, running_daemon

# Postfix accepts no user for both of these.
_OWNER, _MAILBOX_OWNER = "daemon", "nobody"
_QUEUES = "active bounce corrupt defer deferred flush hold incoming maildrop private public saved trace"
MAILBOX = "mailbox"
MISSING_DOMAIN = "missing.example.net"  # which has no mail server


class Postfix(MailDaemon):
    """Accepts e-mails to customer-…@customer.example.com. Only root can start it."""

    log_file, started = "log/postfix.log", "daemon started"

    def __init__(self, folder: Path, **settings: str) -> None:
        self.port = free_port()
        self.url = f"smtp://127.0.0.1:{self.port}"
        self.folder = folder
        self._root = debian_package("postfix")
        self._make_folders()
        self._configure(**settings)
        libraries = f"{self._root}/usr/lib/postfix:{packages.library_path(self._root)}"
        environment = {"MAIL_CONFIG": f"{folder}/config", "RES_OPTIONS": "timeout:1 attempts:1"}
        self._environment = os.environ | environment | {"LD_LIBRARY_PATH": libraries}
        super().__init__([f"{self._root}/usr/lib/postfix/sbin/master", "-d"], self._environment, folder)

    def _make_folders(self) -> None:
        owners = dict.fromkeys(("config", "queue/pid"), "root") | dict.fromkeys(("data", "log"), _OWNER)
        owners |= {MAILBOX: _MAILBOX_OWNER} | {f"queue/{queue}": _OWNER for queue in _QUEUES.split()}
        for name, owner in owners.items():
            made = self.folder / name
            made.mkdir(parents=True)
            os.chown(made, pwd.getpwnam(owner).pw_uid, -1)
        services = configuration("postfix-master.cf", port=self.port)
        (self.folder / "config" / "master.cf").write_text(services)

    def _configure(self, **settings: str) -> None:
        user = pwd.getpwnam(_MAILBOX_OWNER)
        values = {"folder": self.folder, "root": self._root, "owner": _OWNER}
        usual = configuration("postfix-main.cf", **values, uid=user.pw_uid, gid=user.pw_gid)
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        (self.folder / "config" / "main.cf").write_text(usual + "".join(lines))

    @property
    def mailbox(self) -> set[tuple[str, str]]:
        """The Message-ID of each e-mail that Postfix accepted, and the queue id that Postfix gave it."""
        found = map(message_from_bytes, (file.read_bytes() for file in (self.folder / MAILBOX).glob("new/*")))
        return {(each["Message-ID"], re.findall(r" id (\w+)", each["Received"])[0]) for each in found}


def running(**settings: str) -> AbstractContextManager[Postfix]:
    """Run it with *settings* until the block is left. Skips the test if this is not root."""
    if os.geteuid():
        pytest.skip("Postfix starts only as root")
    return running_daemon(Postfix, **settings)


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
    """`relay` sends what it gets to `customers`. Mail for `mail_from` arrives in the mailbox.

    Postfix reports what it cannot deliver. It tries again every second, and reports a delay at once.
    """

    relay: Postfix
    mailbox: Dovecot
    customers: CustomersServer
    mail_from = LOGIN

    async def send(self, message: bytes, *, sender: str, recipient: str) -> None:
        await aiosmtplib.send(
            message, sender=sender, recipients=[recipient], hostname="127.0.0.1", port=self.relay.port
        )


@asynccontextmanager
async def mail_system(authority: Authority) -> AsyncIterator[MailSystem]:
    """Run it until the block is left. Raises LocalStackError."""
    domain = LOGIN.partition("@")[2]
    async with CustomersServer() as customers:
        routes = f"{{ {MISSING_DOMAIN} = smtp: }} {{ {domain} = virtual: }}"
        settings = {
            "virtual_mailbox_domains": domain,
            "virtual_mailbox_maps": f"inline:{{ {{ {LOGIN} = {MAILBOX}/ }} }}",
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
            running(**settings) as relay,
            running_daemon(Dovecot, authority, relay.folder / MAILBOX) as mailbox,
        ):
            yield MailSystem(relay, mailbox, customers)
