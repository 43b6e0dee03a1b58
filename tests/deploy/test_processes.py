"""Child processes and their folders: they end and are freed with this process, however it dies."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT, Claimed, claimed, working_folder
from deploy.local.machine.processes import Program, running
from deploy.local.machine.waiting import wait_until

SLEEP = "import time; print('began', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"

# The sleeper is deaf before its parent dies.
START_AND_DIE = """
import os, sys, time
from pathlib import Path
from deploy.local.machine.folders import Place, working_folder
from deploy.local.machine.processes import Process
from tests.deploy.test_processes import DEAF, program
with working_folder(Place(folder=Path(sys.argv[1])), "server") as folder:
    sleeper = Process(program(folder, DEAF, stop_seconds=3.0))
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


@pytest.mark.parametrize(
    ("code", "seconds", "ended_by"), [(SLEEP, 10.0, "SIGTERM"), (DEAF, 0.1, "SIGKILL")], ids=["usual", "deaf"]
)
def test_program_ends_with_its_context_even_if_it_ignores_its_signal(code, seconds, ended_by, tmp_path):
    with running(program(tmp_path, code, stop_seconds=seconds)) as process:
        assert wait_until(lambda: "began" in process.last_lines(), seconds=30)
        assert process.trouble() is None

    assert process.trouble() == f"The sleeper was killed by {ended_by}."


def test_second_run_in_a_kept_folder_fails_and_says_why(place):
    kept = replace(place, keep=True)
    with (
        working_folder(kept, "server"),
        pytest.raises(LocalStackError, match=r"server is in use by another process"),
        working_folder(kept, "server"),
    ):
        pass


def test_two_runs_that_keep_nothing_use_different_folders_and_remove_them(place):
    with working_folder(place, "server") as one, working_folder(place, "server") as other:
        assert one != other
        (one / "data").write_text("not kept")

    assert list(place.folder.iterdir()) == []


def test_folder_of_a_dead_run_is_in_use_until_its_deaf_program_is_killed_and_then_removed(place):
    subprocess.run([sys.executable, "-c", START_AND_DIE, place.folder], cwd=CHECKOUT, check=False)
    (abandoned,) = place.folder.iterdir()
    ended: list[Path] = []

    with pytest.raises(Claimed), claimed(abandoned):
        pass
    with working_folder(place, "server", end=ended.append):
        assert ended == []
    with claimed(abandoned, seconds=30):
        pass
    with working_folder(place, "server", end=ended.append) as folder:
        assert ended == [abandoned]
        assert list(place.folder.iterdir()) == [folder]
