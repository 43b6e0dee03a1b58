"""Debian's Postfix on a free port of the loopback, with its customers' mailbox."""

import os
import pwd
import re
from contextlib import AbstractContextManager
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.local.machine import packages
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import Program
from tests.harness import mail_daemon
from tests.harness.mail_daemon import MailDaemon
from tests.harness.programs import debian_package

# Postfix accepts no user and no group for two of these.
_OWNER, _GROUP, _MAILBOX_OWNER = "daemon", "mail", "nobody"
_QUEUES = "active bounce corrupt defer deferred flush hold incoming maildrop private public saved trace"
MAILBOX = "mailbox"
_QUEUE_ID = re.compile(r" id (\w+)")
_SERVICES = """
127.0.0.1:{port} inet n - n - - smtpd
postlog unix-dgram n - n - 1 postlogd
anvil unix - - n - 1 anvil
rewrite unix - - n - - trivial-rewrite
pickup unix n - n 60 1 pickup
cleanup unix n - n - 0 cleanup
qmgr unix n - n 300 1 qmgr
virtual unix - n n - - virtual
bounce unix - - n - 0 bounce
defer unix - - n - 0 bounce
trace unix - - n - 0 bounce
error unix - - n - - error
retry unix - - n - - error
smtp unix - - n - - smtp
"""


class Delivered(NamedTuple):
    """An e-mail in the mailbox. Postfix gives each e-mail that it accepts a queue id of its own."""

    message_id: str
    queue_id: str


class Postfix(MailDaemon):
    """Accepts e-mails to customer-…@customer.example.com. Only root can start it."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.port = free_port()
        self.url = f"smtp://127.0.0.1:{self.port}"
        self.folder = folder
        self._root = debian_package("postfix")
        log = folder / "log" / "postfix.log"
        self._make_folders()
        self._configure(**settings)
        libraries = f"{self._root}/usr/lib/postfix:{packages.library_path(self._root)}"
        environment = {"MAIL_CONFIG": f"{folder}/config", "RES_OPTIONS": "timeout:1 attempts:1"}
        program = Program(
            name="Postfix",
            command=[f"{self._root}/usr/lib/postfix/sbin/master", "-d"],
            environment=os.environ | environment | {"LD_LIBRARY_PATH": libraries},
            folder=folder,
            log=folder / "output",
        )
        super().__init__(program, port=self.port, log=log, started="daemon started")

    def _make_folders(self) -> None:
        owners = dict.fromkeys(("config", "queue/pid"), "root") | dict.fromkeys(("data", "log"), _OWNER)
        owners |= {MAILBOX: _MAILBOX_OWNER} | {f"queue/{queue}": _OWNER for queue in _QUEUES.split()}
        for name, owner in owners.items():
            made = self.folder / name
            made.mkdir(parents=True)
            os.chown(made, pwd.getpwnam(owner).pw_uid, -1)
        (self.folder / "config" / "master.cf").write_text(_SERVICES.format(port=self.port))

    def _configure(self, **settings: str) -> None:
        """Write its settings: those below, and *settings*."""
        user = pwd.getpwnam(_MAILBOX_OWNER)
        usual = {
            "compatibility_level": "3.6",
            "daemon_directory": f"{self._root}/usr/lib/postfix/sbin",
            "shlib_directory": f"{self._root}/usr/lib/postfix",
            "queue_directory": f"{self.folder}/queue",
            "data_directory": f"{self.folder}/data",
            "maillog_file": f"{self.folder}/log/postfix.log",
            "maillog_file_prefixes": f"{self.folder}/log",
            "import_environment": "MAIL_CONFIG LD_LIBRARY_PATH RES_OPTIONS",
            "mail_owner": _OWNER,
            "setgid_group": _GROUP,
            "myhostname": "mail.example.com",
            "local_recipient_maps": "",
            "smtpd_relay_restrictions": "reject_unauth_destination",
            "virtual_mailbox_domains": "customer.example.com",
            "virtual_mailbox_maps": f"regexp:{{ {{ /^customer-/ {MAILBOX}/ }} }}",
            "virtual_mailbox_base": self.folder,
            "virtual_uid_maps": f"static:{user.pw_uid}",
            "virtual_gid_maps": f"static:{user.pw_gid}",
        }
        lines = [f"{name} = {value}\n" for name, value in (usual | settings).items()]
        (self.folder / "config" / "main.cf").write_text("".join(lines))

    @property
    def mailbox(self) -> list[Delivered]:
        files = (self.folder / MAILBOX).glob("new/*")
        messages = [message_from_bytes(file.read_bytes()) for file in files]
        return [Delivered(each["Message-ID"], _QUEUE_ID.findall(each["Received"])[0]) for each in messages]


def running(**settings: str) -> AbstractContextManager[Postfix]:
    """Run it with *settings* until the block is left, then print the end of its log.

    Skips the test if this is not root.
    """
    if os.geteuid():
        pytest.skip("Postfix starts only as root")
    return mail_daemon.running(lambda folder: Postfix(folder, **settings))
