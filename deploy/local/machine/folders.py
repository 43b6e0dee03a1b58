"""Working folders: used by one process at a time, and cleaned up after one that died."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine.processes import end_leftovers
from deploy.local.machine.waiting import Stopping, never, wait_until

CHECKOUT = Path(__file__).resolve().parents[3]
LOCAL = CHECKOUT / ".local"

Report = Callable[[str], None]


class Claimed(LocalStackError):
    """Another process uses the folder."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where servers keep their files, whether the files outlive the run, and how progress is reported."""

    folder: Path
    keep: bool
    report: Report
    stopping: Stopping = never

    def log(self, name: str, folder: Path) -> Path:
        """Return the log file of a server whose folder is *folder*."""
        return self.folder / "logs" / f"{name}.log" if self.keep else folder / f"{name}.log"


@contextmanager
def claimed(lock: Path) -> Iterator[None]:
    """Hold *lock* against every other process. The system releases it if this process dies.

    Raises Claimed if another process holds it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _claim(lock, descriptor)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def claimed_in_turn(lock: Path, *, seconds: float, stopping: Stopping = never) -> Iterator[None]:
    """Hold *lock* as soon as no other process does. Raises LocalStackError if that takes too long."""
    with ExitStack() as held:
        reason: Claimed | None = None

        def succeeded() -> bool:
            nonlocal reason
            try:
                held.enter_context(claimed(lock))
            except Claimed as error:
                reason = error
                return False
            return True

        if not wait_until(succeeded, seconds=seconds, stopping=stopping, pause_seconds=0.1):
            raise LocalStackError(f"{reason} It still is after {seconds:.0f} seconds.")
        yield


def _claim(lock: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = lock.read_text().strip()
        raise Claimed(f"{lock.with_suffix('')} is in use by process {owner}.") from None
    # The previous holder may have removed the file: then no other process sees this lock.
    if not lock.exists() or os.fstat(descriptor).st_ino != lock.stat().st_ino:
        raise Claimed(f"{lock} was removed at this moment.")
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


@contextmanager
def working_folder(place: Place, name: str, *, end: Callable[[Path], None] = end_leftovers) -> Iterator[Path]:
    """Yield a folder for a server: that of the last run if it is kept, else a new one.

    *end* ends the processes that a dead run left behind in a folder.
    """
    if place.keep:
        with _kept_folder(place.folder / name, end) as folder:
            yield folder
    else:
        _remove_abandoned(place.folder, name, end)
        with _thrown_away_folder(place.folder / f"{name}-{secrets.token_hex(4)}") as folder:
            yield folder


@contextmanager
def _kept_folder(folder: Path, end: Callable[[Path], None]) -> Iterator[Path]:
    with ExitStack() as held:
        try:
            held.enter_context(claimed(_lock_of(folder)))
        except Claimed as error:
            raise LocalStackError(f"{error} Stop the other `make run` first.") from None
        folder.mkdir(parents=True, exist_ok=True)
        end(folder)
        yield folder


@contextmanager
def _thrown_away_folder(folder: Path) -> Iterator[Path]:
    with claimed(_lock_of(folder)):
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            _remove(folder)


def _remove_abandoned(parent: Path, name: str, end: Callable[[Path], None]) -> None:
    """Remove the folders of runs that died."""
    for lock in parent.glob(f"{name}-*.lock"):
        try:
            with claimed(lock):
                end(lock.with_suffix(""))
                _remove(lock.with_suffix(""))
        except Claimed:
            continue


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
