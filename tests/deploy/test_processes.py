"""Child processes: how they end, and that they do when this process dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT, Claimed, claimed
from deploy.local.machine.processes import Program, run_command, running
from deploy.local.machine.waiting import wait_until

SLEEP = "import time; time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"

# The sleeper is deaf before its parent dies.
START_AND_DIE = """
import os, sys, time
from pathlib import Path
from deploy.local.machine.folders import claimed
from deploy.local.machine.processes import Process
from tests.deploy.test_processes import program
lock = Path(sys.argv[1])
with claimed(lock):
    sleeper = Process(program(lock.parent, "print('began', flush=True);" + sys.argv[2], stop_seconds=3.0))
    while "began" not in sleeper.last_lines():
        time.sleep(0.01)
    time.sleep(0.2)
    os._exit(9)
"""


def program(folder: Path, code: str, *, stop_seconds: float = 10.0) -> Program:
    return Program(
        name="sleeper",
        command=[sys.executable, "-c", code],
        environment=os.environ,
        folder=folder,
        log=folder / "sleeper.log",
        stop_seconds=stop_seconds,
    )


def test_program_ends_with_its_context(tmp_path):
    with running(program(tmp_path, SLEEP)) as process:
        assert process.trouble() is None

    assert process.trouble() == "The sleeper was killed by SIGTERM."


def test_program_that_ignores_its_signal_is_killed(tmp_path):
    with running(program(tmp_path, DEAF, stop_seconds=0.1)) as process:
        assert wait_until(lambda: "deaf" in process.last_lines(), seconds=30)

    assert process.trouble() == "The sleeper was killed by SIGKILL."


def test_death_is_described_with_the_end_of_the_log(tmp_path):
    with running(program(tmp_path, "raise SystemExit('no such setting')")) as process:
        assert wait_until(lambda: process.trouble() is not None, seconds=30)
        text = process.describe(process.trouble() or "")

    assert text.startswith("The sleeper exited with status 1.")
    assert text.endswith("    no such setting")


def test_folder_is_in_use_until_a_deaf_program_of_a_parent_that_died_is_killed(tmp_path):
    command = [sys.executable, "-c", START_AND_DIE, str(tmp_path / "run.lock"), DEAF]

    assert subprocess.run(command, cwd=CHECKOUT, check=False).returncode == 9

    with pytest.raises(Claimed), claimed(tmp_path / "run.lock"):
        pass
    with claimed(tmp_path / "run.lock", seconds=30):
        pass


def test_failed_command_is_reported_with_its_output(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('the schema is newer')"]

    with pytest.raises(LocalStackError, match=r"(?s)`schema` failed:.*the schema is newer"):
        run_command("schema", command, environment=os.environ, folder=tmp_path, seconds=30)
