"""`make clean`: remove what earlier runs left behind, unless one is running."""

import importlib
import shutil
from contextlib import suppress

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
    with suppress(ImportError):  # Nothing is installed, so no container has ever run.
        importlib.import_module("deploy.local.servers.containers").remove_volumes()
    shutil.rmtree(LOCAL)
    report("Removed .local.")
