"""The mail catcher as a process."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.waiting import wait_until


@contextmanager
def mail_catcher(folder: Path) -> Iterator[int]:
    """Run a mail server that writes accepted mail to *folder*; yields its port."""
    port = free_port()
    command = [sys.executable, "-m", "deploy.local.mail_catcher", str(port), str(folder)]
    process = subprocess.Popen(command, cwd=CHECKOUT)
    try:
        assert wait_until(lambda: accepts(port), seconds=30)
        yield port
    finally:
        process.terminate()
        process.wait(30)
