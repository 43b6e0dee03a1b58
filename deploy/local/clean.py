"""`make clean`: remove what earlier runs left behind, unless one is running."""

import shutil

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL, Claimed, Report, claimed


def main(report: Report) -> None:
    """Remove `.local` and the volumes of containers. Raises LocalStackError while a stack runs."""
    try:
        for folder in (LOCAL, *LOCAL.glob("*/"), *LOCAL.glob("*/*/")):
            with claimed(folder):
                pass
    except Claimed as error:
        raise LocalStackError(f"{error} Stop it first.") from None
    _remove_volumes()
    shutil.rmtree(LOCAL)
    report("Removed .local.")


def _remove_volumes() -> None:
    try:
        from deploy.local.servers.containers import remove_volumes  # noqa: PLC0415 - see below
    except ImportError:
        return  # Nothing is installed, so no container has ever run.
    remove_volumes()
