"""`make clean`: end and remove what earlier runs left behind, unless one is running."""

import shutil

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL, Claimed, claimed
from deploy.local.machine.processes import end_leftovers
from deploy.local.terminal import Terminal


def main(terminal: Terminal) -> int:
    """Remove `.local` and the volumes of containers. Raises LocalStackError while a stack runs."""
    _check_nothing_runs()
    for folder in (LOCAL, *LOCAL.glob("*/"), *LOCAL.glob("*/*/")):
        end_leftovers(folder)
    _remove_volumes()
    shutil.rmtree(LOCAL, ignore_errors=True)
    terminal.report("Removed .local.")
    return 0


def _check_nothing_runs() -> None:
    for lock in (*LOCAL.glob("*.lock"), *LOCAL.glob("*/*.lock")):
        try:
            with claimed(lock):
                pass
        except Claimed as error:
            raise LocalStackError(f"{error} Stop it first.") from None


def _remove_volumes() -> None:
    try:
        from deploy.local.servers.containers import remove_volumes  # noqa: PLC0415 - see below
    except ImportError:
        return  # Nothing is installed, so no container has ever run.
    remove_volumes()
