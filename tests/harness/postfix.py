"""Debian's Postfix on a free port of the loopback, with its customers' mailbox."""

import os
import pwd
import re
import signal
from contextlib import AbstractContextManager
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.local.machine import packages
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import run_command
from tests.harness import mail_daemon
from tests.harness.mail_daemon import MailDaemon
from tests.harness.programs import configuration, debian_package

# Postfix accepts no user for both of these.
_OWNER, _MAILBOX_OWNER = "daemon", "nobody"
_QUEUES = "active bounce corrupt defer deferred flush hold incoming maildrop private public saved trace"
MAILBOX = "mailbox"


class Delivered(NamedTuple):
    """An e-mail in the mailbox. Postfix gives each e-mail that it accepts a queue id of its own."""

    message_id: str
    queue_id: str


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
        """Write its settings: the usual ones, and *settings*, which override them."""
        user = pwd.getpwnam(_MAILBOX_OWNER)
        values = {"folder": self.folder, "root": self._root, "owner": _OWNER}
        usual = configuration("postfix-main.cf", **values, uid=user.pw_uid, gid=user.pw_gid)
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        (self.folder / "config" / "main.cf").write_text(usual + "".join(lines))

    def reload(self) -> None:
        """Return to its usual settings."""
        self._configure()
        self._process.send_signal(signal.SIGHUP)

    def flush(self) -> None:
        """Try at once to deliver what waits."""
        command = [f"{self._root}/usr/sbin/postqueue", "-f"]
        run_command("postqueue -f", command, folder=self.folder, seconds=30, environment=self._environment)

    @property
    def mailbox(self) -> list[Delivered]:
        files = (self.folder / MAILBOX).glob("new/*")
        messages = [message_from_bytes(file.read_bytes()) for file in files]
        return [
            Delivered(each["Message-ID"], re.findall(r" id (\w+)", each["Received"])[0]) for each in messages
        ]


def running(**settings: str) -> AbstractContextManager[Postfix]:
    """Run it with *settings* until the block is left, then print the end of its log.

    Skips the test if this is not root.
    """
    if os.geteuid():
        pytest.skip("Postfix starts only as root")
    return mail_daemon.running(lambda folder: Postfix(folder, **settings))
