"""Debian's Postfix on a free port of the loopback, with its customers' mailbox."""

import os
import pwd
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

from deploy.local.machine import packages
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.processes import Process, Program, wait_for
from deploy.local.machine.waiting import wait_until

# Postfix accepts no user and no group for two of these.
_OWNER, _GROUP, _MAILBOX_OWNER = "daemon", "mail", "nobody"
_QUEUES = "active bounce corrupt defer deferred flush hold incoming maildrop private public saved trace"
_MAILBOX = "mailbox"
_QUEUE_ID = re.compile(r" id (\w+)")
_SERVICES = """
127.0.0.1:{port} inet n - n - - smtpd
postlog unix-dgram n - n - 1 postlogd
anvil unix - - n - 1 anvil
rewrite unix - - n - - trivial-rewrite
cleanup unix n - n - 0 cleanup
qmgr unix n - n 300 1 qmgr
virtual unix - n n - - virtual
bounce unix - - n - 0 bounce
defer unix - - n - 0 bounce
trace unix - - n - 0 bounce
error unix - - n - - error
"""


class Delivered(NamedTuple):
    """An e-mail in the mailbox. Postfix gives each e-mail that it accepts a queue id of its own."""

    message_id: str
    queue_id: str


class Postfix:
    """Accepts e-mails to customer-…@customer.example.com. Only root can start it."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.port = free_port()
        self.url = f"smtp://127.0.0.1:{self.port}"
        self._folder = folder
        self._log = folder / "log" / "postfix.log"
        self._root = packages.unpacked("postfix")
        self._make_folders()
        self._configure(**settings)
        environment = {"MAIL_CONFIG": f"{folder}/config", "RES_OPTIONS": "timeout:1 attempts:1"}
        libraries = f"{self._root}/usr/lib/postfix:{packages.library_path(self._root)}"
        program = Program(
            name="Postfix",
            command=[f"{self._root}/usr/lib/postfix/sbin/master", "-d"],
            environment=os.environ | environment | {"LD_LIBRARY_PATH": libraries},
            folder=folder,
            log=folder / "output",
        )
        self._process = Process(program)

    def _make_folders(self) -> None:
        owners = dict.fromkeys(("config", "queue/pid"), "root") | dict.fromkeys(("data", "log"), _OWNER)
        owners |= {_MAILBOX: _MAILBOX_OWNER} | {f"queue/{queue}": _OWNER for queue in _QUEUES.split()}
        for name, owner in owners.items():
            made = self._folder / name
            made.mkdir(parents=True)
            os.chown(made, pwd.getpwnam(owner).pw_uid, -1)
        (self._folder / "config" / "master.cf").write_text(_SERVICES.format(port=self.port))

    def _configure(self, **settings: str) -> None:
        """Write its settings: those below, and *settings*."""
        user = pwd.getpwnam(_MAILBOX_OWNER)
        usual = {
            "compatibility_level": "3.6",
            "daemon_directory": f"{self._root}/usr/lib/postfix/sbin",
            "shlib_directory": f"{self._root}/usr/lib/postfix",
            "queue_directory": f"{self._folder}/queue",
            "data_directory": f"{self._folder}/data",
            "maillog_file": self._log,
            "maillog_file_prefixes": self._log.parent,
            "import_environment": "MAIL_CONFIG LD_LIBRARY_PATH RES_OPTIONS",
            "mail_owner": _OWNER,
            "setgid_group": _GROUP,
            "myhostname": "mail.example.com",
            "local_recipient_maps": "",
            "smtpd_relay_restrictions": "reject_unauth_destination",
            "virtual_mailbox_domains": "customer.example.com",
            "virtual_mailbox_maps": f"regexp:{{ {{ /^customer-/ {_MAILBOX}/ }} }}",
            "virtual_mailbox_base": self._folder,
            "virtual_uid_maps": f"static:{user.pw_uid}",
            "virtual_gid_maps": f"static:{user.pw_gid}",
        }
        lines = [f"{name} = {value}\n" for name, value in (usual | settings).items()]
        (self._folder / "config" / "main.cf").write_text("".join(lines))

    def reload(self) -> None:
        """Return to its usual settings."""
        self._configure()
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Send SIGKILL to all of its processes, and wait until none listens: the next master would end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stop()
        assert wait_until(lambda: not accepts(self.port), seconds=30, pause_seconds=0.01)

    def restart(self) -> None:
        """Start it again after `kill`, and wait until it listens."""
        self._process.restart()
        self.wait_until_it_listens()

    def wait_until_it_listens(self) -> None:
        """Raise LocalStackError if that takes too long."""
        wait_for(self._process, lambda: "daemon started" in self.log and accepts(self.port), seconds=30)

    @property
    def log(self) -> str:
        """What it logged in all its lives."""
        return self._log.read_text() if self._log.exists() else ""

    @property
    def mailbox(self) -> list[Delivered]:
        files = (self._folder / _MAILBOX).glob("new/*")
        messages = [message_from_bytes(file.read_bytes()) for file in files]
        return [Delivered(each["Message-ID"], _QUEUE_ID.findall(each["Received"])[0]) for each in messages]


@contextmanager
def running(**settings: str) -> Iterator[Postfix]:
    """Run it with *settings* until the block is left, then print the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # Its processes that are not root look for their files by name.
        server = Postfix(Path(folder), **settings)
        try:
            server.wait_until_it_listens()
            yield server
        finally:
            server.kill()
            print("--- Postfix", server.log[-4000:], sep="\n")  # noqa: T201
