"""Child processes, and their end after a crash of this one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.errors import Interrupted, LocalStackError
from deploy.local.machine.processes import (
    Process,
    Program,
    command_line,
    end_leftovers,
    identity,
    last_lines,
    run_command,
    running,
)
from deploy.local.machine.waiting import wait_until

SLEEP = "import time; time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"


def program(folder: Path, code: str, *, stop_seconds: float = 10.0) -> Program:
    return Program(
        name="sleeper",
        command=[sys.executable, "-c", code],
        environment=os.environ,
        folder=folder,
        log=folder / "sleeper.log",
        pid_file=folder / "sleeper.pid",
        stop_seconds=stop_seconds,
    )


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that no pid file names."""
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        yield process
        process.kill()


def test_program_ends_with_its_context(tmp_path: Path) -> None:
    with running(program(tmp_path, SLEEP)) as process:
        assert process.trouble() is None
        assert (tmp_path / "sleeper.pid").exists()

    assert process.trouble() == "The sleeper was killed by SIGTERM."
    assert not (tmp_path / "sleeper.pid").exists()


def test_program_that_ignores_its_signal_is_killed(tmp_path: Path) -> None:
    with running(program(tmp_path, DEAF, stop_seconds=0.1)) as process:
        assert wait_until(lambda: "deaf" in last_lines(tmp_path / "sleeper.log"), seconds=30)

    assert process.trouble() == "The sleeper was killed by SIGKILL."


def test_death_is_described_with_the_end_of_the_log(tmp_path: Path) -> None:
    with running(program(tmp_path, "raise SystemExit('no such setting')")) as process:
        assert wait_until(lambda: process.trouble() is not None, seconds=30)
        text = process.describe(process.trouble() or "")

    assert text.startswith("The sleeper exited with status 1.")
    assert text.endswith("    no such setting")


def test_leftover_of_a_crashed_run_is_ended(tmp_path: Path) -> None:
    left_over = Process(program(tmp_path, SLEEP))

    end_leftovers(tmp_path)

    assert wait_until(lambda: left_over.trouble() is not None, seconds=30)
    assert left_over.trouble() == "The sleeper was killed by SIGTERM."
    assert not (tmp_path / "sleeper.pid").exists()


def test_process_with_the_reused_id_of_an_old_one_is_left_alone(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    pid_file = tmp_path / "sleeper.pid"
    pid_file.write_text(f"{stranger.pid}\nanother start\n{int(signal.SIGKILL)}\n")

    end_leftovers(tmp_path)

    assert stranger.poll() is None
    assert not pid_file.exists()


def test_pid_files_of_servers_themselves_are_left_alone(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    pid_file = tmp_path / "postmaster.pid"
    pid_file.write_text(f"{stranger.pid}\n/some/data\n1700000000\n5432\n")

    end_leftovers(tmp_path)

    assert stranger.poll() is None
    assert pid_file.exists()


def test_process_that_has_ended_has_no_identity_even_before_it_is_reaped(
    stranger: subprocess.Popen[bytes],
) -> None:
    assert identity(stranger.pid) is not None
    assert wait_until(lambda: "time.sleep" in command_line(stranger.pid), seconds=30)

    stranger.kill()

    assert wait_until(lambda: identity(stranger.pid) is None, seconds=30)


def test_failed_command_is_reported_with_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('the schema is newer')"]

    with pytest.raises(LocalStackError, match=r"(?s)`schema` failed:.*the schema is newer"):
        run_command("schema", command, environment=os.environ, folder=tmp_path, seconds=30)


def test_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLEEP]

    with pytest.raises(LocalStackError, match="`sleep` did not end within 0 seconds"):
        run_command("sleep", command, environment=os.environ, folder=tmp_path, seconds=0.1)


def test_command_is_abandoned_when_the_end_is_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLEEP]

    with pytest.raises(Interrupted):
        run_command(
            "sleep", command, environment=os.environ, folder=tmp_path, seconds=30, stopping=lambda: True
        )
