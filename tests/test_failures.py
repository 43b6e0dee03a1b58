"""A test that fails shows its cause at the end of the output."""

import sys
from pathlib import Path

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.processes import run_command

_FAILING = """
from tests import conftest

def test_that_fails():
    conftest.LOGS["Postgres"] = lambda: "checkpoint complete\\n" * 40
    print("a request was served\\n" * 300 + "a figure")
    assert 1 == 2, "the cause"
"""


def test_cause_is_in_the_last_twenty_lines_and_the_logs_in_a_file_that_they_name(tmp_path):
    (tmp_path / "test_failing.py").write_text(_FAILING)
    command = ["-m", "pytest", "-p", "tests.conftest", "--rootdir", tmp_path, "test_failing.py"]
    shell = ["sh", "-c", '"$@"; test $? = 1', "sh", sys.executable, *command]

    shown = run_command(
        "pytest", shell, folder=tmp_path, seconds=60, environment={"PYTHONPATH": str(CHECKOUT)}
    )

    end = shown.splitlines()[-20:]
    assert "E       AssertionError: the cause" in end
    (file,) = (Path(line) for line in end if line.endswith("test_that_fails-call.log"))
    logged = file.read_text()
    file.unlink()
    assert logged.count("checkpoint complete") == 40
    assert logged.count("a request was served") == 300
