"""One process at a time uses a folder, and the next one cleans up after a process that died."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT, working_folder

CLAIM_AND_DIE = """
import os, sys
from pathlib import Path
from deploy.local.machine.folders import Place, working_folder
place = Place(folder=Path(sys.argv[1]), keep=False, report=print)
with working_folder(place, "server") as folder:
    (folder / "data").write_text("half written")
    os._exit(9)
"""


def test_second_run_in_a_kept_folder_fails_and_says_why(place):
    kept = replace(place, keep=True)
    with (
        working_folder(kept, "server"),
        pytest.raises(LocalStackError, match=r"server is in use by process \d+"),
        working_folder(kept, "server"),
    ):
        pass


def test_folder_that_is_not_kept_is_removed(place):
    with working_folder(place, "server") as folder:
        (folder / "data").write_text("not kept")

    assert list(place.folder.iterdir()) == []


def test_two_runs_that_keep_nothing_use_different_folders(place):
    with working_folder(place, "server") as one, working_folder(place, "server") as other:
        assert one != other
        assert one.is_dir()


def test_next_run_ends_and_removes_what_a_dead_run_left_behind(place):
    subprocess.run([sys.executable, "-c", CLAIM_AND_DIE, place.folder], cwd=CHECKOUT, check=False)
    (abandoned,) = [path for path in place.folder.iterdir() if path.is_dir()]
    ended: list[Path] = []

    with working_folder(place, "server", end=ended.append) as folder:
        assert ended == [abandoned]
        assert sorted(place.folder.iterdir()) == sorted([folder, folder.with_name(f"{folder.name}.lock")])
