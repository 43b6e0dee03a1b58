"""Debian packages, installed where this user may."""

import subprocess
from pathlib import Path
from typing import IO

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Report
from deploy.local.machine.waiting import wait_until

_INSTALL_SECONDS = 900.0
_NOT_ALLOWED = 3
_SCRIPT = Path(__file__).parent.with_name("apt-install")


def install(package: str, *services: str, report: Report, log: Path) -> bool:
    """Install *package* without starting its *services*. Return whether that is allowed and worked.

    Only the time limit ends it early, or Ctrl-C, which reaches the package manager directly: no package
    should be left half installed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output, log.open() as progress:
        process = subprocess.Popen(
            [_SCRIPT, package, *services], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )

        def ended() -> bool:
            over = process.poll() is not None
            _report_steps(progress, report)
            return over

        if not wait_until(ended, seconds=_INSTALL_SECONDS, pause_seconds=0.5):
            raise LocalStackError(f"Installing {package} takes too long (process {process.pid}): see {log}.")
    if process.returncode not in (0, _NOT_ALLOWED):
        report(f"  That failed. The output is in {log}.")
    return process.returncode == 0


def _report_steps(progress: IO[str], report: Report) -> None:
    """Report one line a package from the package manager's output."""
    for line in progress:
        if line.startswith(("Need to get", "Setting up")):
            report(f"  {line.strip().removesuffix(' ...')}")
