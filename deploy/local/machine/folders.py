"""Working folders: used by one process and its children at a time, and cleaned up after one that died."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine.waiting import wait_until

CHECKOUT = Path(__file__).resolve().parents[3]
LOCAL = CHECKOUT / ".local"

_ENDING_SECONDS = 10.0  # for the children of a server that was killed: they end a moment after it

Report = Callable[[str], None]

held_locks: set[int] = set()  # descriptors, which children inherit


class Claimed(LocalStackError):
    """Another process uses the folder."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where servers keep their files, whether the files outlive the run, and how progress is reported."""

    folder: Path
    keep: bool = False
    report: Report = print

    def log(self, name: str, folder: Path) -> Path:
        """Return the log file of a server whose folder is *folder*."""
        return self.folder / "logs" / f"{name}.log" if self.keep else folder / f"{name}.log"


@contextmanager
def claimed(folder: Path, *, seconds: float = 0.0, inherited: bool = True) -> Iterator[None]:
    """Hold *folder*, made if it is missing, against every other process, as soon as no other process does.

    The system releases it when this process has ended, and with *inherited* also the servers that it started
    meanwhile. Raises Claimed if another process holds it for longer than *seconds*.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not wait_until(lambda: _lock(descriptor), seconds=seconds, pause_seconds=0.1):
            raise Claimed(f"{folder} is in use by another process.")
        # The previous holder may have removed the folder: then no other process sees this lock.
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise Claimed(f"{folder} was removed at this moment.")
        if inherited:
            held_locks.add(descriptor)
        yield
    finally:
        held_locks.discard(descriptor)
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock the folder, and return whether that was possible."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # for example, on NFS
        raise LocalStackError(f"No lock in this checkout: {error.strerror}. Use a local disk.") from None
    return True


@contextmanager
def working_folder(
    place: Place, name: str, *, end: Callable[[Path], None] = lambda _: None
) -> Iterator[Path]:
    """Yield a folder for a server: that of the last run if it is kept, else a new one.

    *end* ends what a run that died left behind in a folder, beside its child processes.
    """
    if place.keep:
        folder = place.folder / name
        with claimed(folder, seconds=_ENDING_SECONDS):
            end(folder)
            yield folder
        return
    # The folders of runs of which no process is left. Another process may be removing one, too.
    for folder in place.folder.glob(f"{name}-*/"):
        with suppress(Claimed, OSError), claimed(folder):
            end(folder)
            shutil.rmtree(folder, ignore_errors=True)
    token = secrets.token_hex(4)
    unlocked = place.folder / f".{token}"  # Renamed when locked, or another process would remove it.
    with claimed(unlocked):
        folder = unlocked.rename(place.folder / f"{name}-{token}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def secret_in(file: Path) -> str:
    """Return the 32 random bytes in a file, as text for URLs, made when they are first asked for."""
    if not file.exists():
        write_private(file, f"{secrets.token_urlsafe(32)}\n")
    return file.read_text().strip()


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically."""
    unfinished = file.with_name(f"{file.name}.part")
    unfinished.touch(mode=0o600)
    unfinished.write_text(text)
    unfinished.rename(file)
