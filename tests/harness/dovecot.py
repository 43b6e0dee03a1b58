"""Debian's Dovecot on free ports of the loopback: a mailbox that is read over IMAP.

Dovecot has no setting for the folder of its modules, /usr/lib/dovecot/modules. So it loads a copy of its
library in which this path is replaced by one in its working directory. This is undocumented, and so is how
doveconf starts Dovecot.
"""

import base64
import imaplib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from grp import getgrgid
from pathlib import Path
from pwd import getpwnam, getpwuid
from typing import NamedTuple
from urllib.parse import quote

import jwt

from deploy.local.machine import packages
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import run_command
from tests.harness.certificates import Authority
from tests.harness.programs import configuration, debian_package
from tests.harness.servers import MailDaemon

# The user of its processes and owner of the mailbox. As root, the user as whom Postfix delivers.
_USER = getpwuid(os.geteuid()).pw_name if os.geteuid() else "nobody"
LOGIN, PASSWORD = "calculations@service.example.com", "p@ss/word%1"
_TOKEN_KEY = b"k" * 32
_TOKENS = """
introspection_mode = local
local_validation_key_dict = fs:posix:prefix={folder}/keys/
username_attribute = sub
"""
_LINKS = 50_000  # to a file, fewer than any file system allows
_LIBRARY = "libdovecot.so.0"
_MODULES = b"/usr/lib/dovecot/modules\0"
# The options with which doveconf starts Dovecot. Otherwise Dovecot would look for doveconf in /usr/bin.
_STARTERS = {"2.3": ["-fservice=master", "-mmaster", "-p", "-e"], "2.4": ["-F"]}


class Kept(NamedTuple):
    flags: set[str]  # without \Recent, which depends on the session
    content: bytes


def access_token() -> str:
    """Return an OAuth 2.0 access token with which LOGIN can log in."""
    now = int(time.time())
    claims = {"sub": LOGIN, "iat": now - 60, "nbf": now - 60, "exp": now + 600}
    return jwt.encode(claims, _TOKEN_KEY, algorithm="HS256")


class Dovecot(MailDaemon):
    """Serves the mailbox (a Maildir) to LOGIN: at `url` with PASSWORD, and with TLS at `tls_url`.

    Its certificate is of *authority*. It begins with an empty mailbox if it is given none, to which another
    server delivers. *settings* are Dovecot's, for instance `imap_capability`.
    """

    log_file, started = "dovecot.log", "starting up for imap"

    def __init__(
        self, folder: Path, authority: Authority, mailbox: Path | None = None, **settings: str
    ) -> None:
        self._folder, self._mailbox = folder, mailbox or folder / "mailbox"
        self._root = debian_package("dovecot-imapd")
        self.port, self.tls_port = free_port(), free_port()
        account = f"{quote(LOGIN, safe='')}:{quote(PASSWORD, safe='')}@127.0.0.1"
        self.url = f"imap://{account}:{self.port}/INBOX"
        self.tls_url = f"imaps://{account}:{self.tls_port}/INBOX"
        self._make_files()
        libraries = f"{self._root}/usr/lib/dovecot"
        paths = (folder, libraries, f"{libraries}/modules/old-stats", packages.library_path(self._root))
        environment = os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, paths))}
        dovecot = f"{self._root}/usr/sbin/dovecot"
        asking = [dovecot, "--version"]
        version = run_command("dovecot", asking, folder=folder, seconds=30, environment=environment)[:3]
        self._configure(version, authority.certificate(), **settings)
        settings_file = ("-c", f"{folder}/dovecot.conf")
        starter = [f"{self._root}/usr/bin/doveconf", *settings_file, *_STARTERS[version]]
        super().__init__([*starter, dovecot, "-F", *settings_file], environment, folder)

    def _make_files(self) -> None:
        for made in (self._folder / "run", *(self._mailbox / name for name in ("cur", "new", "tmp"))):
            made.mkdir(parents=True, exist_ok=True)
        for name in ("", "cur", "new", "tmp"):
            shutil.chown(self._mailbox / name, _USER)
        (self._folder / "logins").write_text(f"{LOGIN}:{{PLAIN}}{PASSWORD}\n")
        (self._folder / "tokens").write_text(_TOKENS.format(folder=self._folder))
        keys = self._folder / "keys/default/HS256"
        keys.mkdir(parents=True)
        (keys / "default").write_bytes(base64.b64encode(_TOKEN_KEY))
        libraries = self._root / "usr/lib/dovecot"
        original = (libraries / _LIBRARY).read_bytes()
        assert original.count(_MODULES) == 1
        replaced = original.replace(_MODULES, b"modules".ljust(len(_MODULES), b"\0"))
        (self._folder / _LIBRARY).write_bytes(replaced)
        (self._folder / "run" / "modules").symlink_to(libraries / "modules")

    def _configure(self, version: str, certificate: Path, **settings: str) -> None:
        usual = configuration(
            f"dovecot-{version}.conf",
            folder=self._folder,
            root=self._root,
            mailbox=self._mailbox,
            certificate=certificate,
            user=_USER,
            group=getgrgid(getpwnam(_USER).pw_gid).gr_name,
            port=self.port,
            tls_port=self.tls_port,
        )
        others = (f"{name} = {value}\n" for name, value in settings.items())
        (self._folder / "dovecot.conf").write_text(usual + "".join(others))

    @contextmanager
    def connected(self) -> Iterator[imaplib.IMAP4]:
        with imaplib.IMAP4("127.0.0.1", self.port, timeout=60) as connection:
            connection.login(LOGIN, PASSWORD)
            connection.select()
            yield connection

    def put(self, message: bytes) -> None:
        with self.connected() as connection:
            assert connection.append("INBOX", None, None, message)[0] == "OK"

    def fill(self, count: int, message: bytes, *, flags: str = "") -> None:
        r"""Add *count* copies of a message, quickly. Of *flags*, F is \Flagged, T is \Deleted, S is \Seen."""
        for number in range(count):
            original = self._folder / f"original-{flags}-{number // _LINKS}"
            if number % _LINKS == 0:
                original.write_bytes(message)
                shutil.chown(original, _USER)
            (self._mailbox / "cur" / f"{original.name}-{number}:2,{flags}").hardlink_to(original)
        with self.connected():  # It gives each its UID.
            pass

    @property
    def messages(self) -> list[Kept]:
        with self.connected() as connection:
            _, parts = connection.uid("FETCH", "1:*", "(FLAGS BODY.PEEK[])")
        described = [part for part in parts if isinstance(part, tuple)]
        return [
            Kept({flag.decode() for flag in imaplib.ParseFlags(head)} - {r"\Recent"}, content)
            for head, content in described
        ]
