"""The installation: its progress in a terminal, its end by Ctrl-C, and what it has installed."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from deploy.local.machine.folders import CHECKOUT

# It makes an environment whose pip collects two packages, and is then interrupted.
PYTHON = """#!/bin/sh
case "$*" in
--version) echo Python 3.11.7 ;;
*"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
*"pip install"*)
    echo 'Collecting one (from -r locks)'
    echo 'Collecting two (from -r locks)'
    trap 'echo Traceback >&2; exit 2' INT; while :; do sleep 0.1; done ;;
esac
"""


def test_terminal_shows_progress_and_ctrl_c_is_one_line(tmp_path: Path):
    for name in ("deploy/local/install", "deploy/locks/development.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o700)

    terminal, its_side = pty.openpty()
    with subprocess.Popen(
        [tmp_path / "deploy" / "local" / "install", python, ".venv"],
        stdout=its_side,
        stderr=its_side,
        start_new_session=True,
    ) as install:
        os.close(its_side)
        shown = read_until(terminal, b"2 packages downloaded")
        os.killpg(install.pid, signal.SIGINT)
        shown += read_until(terminal, b"Run it again to go on.")
    os.close(terminal)

    assert install.returncode == 130, shown
    assert b"Stopped. Run it again to go on." in shown
    assert b"Traceback" not in shown


def test_packages_of_the_lock_suit_each_other():
    """They are installed without resolving dependencies, so pip does not check this by itself."""
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, check=False)

    assert checked.returncode == 0, checked.stdout


def read_until(terminal: int, text: bytes) -> bytes:
    """Return what the terminal shows up to *text*, or all if the program ends before or shows no more."""
    shown = b""
    while text not in shown and select.select([terminal], [], [], 30)[0]:
        try:
            shown += os.read(terminal, 1024)
        except OSError:  # Linux: the program has ended.
            break
    return shown
