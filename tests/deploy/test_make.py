"""`make run` and `make clean` as the front page describes them, in a copy of the checkout, and CI."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.packages import PACKAGES
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import Program, run_command, running, wait_for
from deploy.local.machine.waiting import wait_until
from deploy.local.servers.server import trouble_of_rabbitmq
from deploy.local.stack import is_ready
from tests.deploy.pages import README, WORKER, code_blocks

MAKE = ("make", "--assume-old", ".venv/installed")
RETRIEVE = '. .local/env; curl -s "$BASE_URL/v1/request/{}" -H "Authorization: Bearer $ACCESS_TOKEN"'


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with its own data, the packages of this one, and free ports."""
    for name in ("deploy", "service", "worker"):
        shutil.copytree(CHECKOUT / name, tmp_path / name)
    (tmp_path / "tests" / "end_to_end").mkdir(parents=True)
    for name in ("Makefile", "schema.sql", "tests/end_to_end/first_consumer.py"):
        shutil.copy(CHECKOUT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".local" / "packages").mkdir(parents=True)
    if (PACKAGES / "rabbitmq-server").exists():
        (tmp_path / ".local" / "packages" / "rabbitmq-server").symlink_to(PACKAGES / "rabbitmq-server")
    for variable in ("DATABASE_URL", "AMQP_URL", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("PORT", "JOURNEY_PORT"):
        monkeypatch.setenv(variable, str(free_port()))
    return tmp_path


@contextmanager
def until_interrupted(folder: Path, *command: str, says: str, **variables: str) -> Iterator[Path]:
    """Keep a program running until the end of the block, and stop it with Ctrl-C; yields its output."""
    environment, log = {**os.environ, **variables}, folder / f"{command[0]}.log"
    program = Program(name=command[-1], command=command, environment=environment, folder=folder, log=log)
    with running(program) as process:
        wait_for(process, lambda: says in log.read_text(), seconds=240)
        yield log
        os.killpg(process.pid, signal.SIGINT)
        assert wait_until(lambda: process.exit_status is not None, seconds=60)


@contextmanager
def make_run(checkout: Path, **variables: str) -> Iterator[Path]:
    with until_interrupted(checkout, *MAKE, "run", says="\nready\n", **variables) as output:
        yield output
    assert "\nStopped. The data is kept in .local.\n" in output.read_text()


def run(checkout: Path, *command: str) -> str:
    return run_command(command[0], command, folder=checkout, seconds=120)


def sourced(checkout: Path) -> dict[str, str]:
    """Return the environment of a shell that has sourced .local/env."""
    printed = run(checkout, "sh", "-euc", ". .local/env; exec env -0")
    return dict(entry.split("=", 1) for entry in printed.split("\0") if "=" in entry)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_stack_answers_restarts_its_servers_and_keeps_its_data_until_it_is_cleaned(checkout):
    calculating = ("sh", "-euc", code_blocks(WORKER, "First queue to first calculation", "sh")[0])
    calls = code_blocks(README, "Two commands", "sh")[-1]
    with make_run(checkout):
        waits = {"says": "Waiting for requests.", "PYTHONUNBUFFERED": "1"}
        with until_interrupted(checkout, *calculating, **waits) as output:
            printed = run(checkout, "sh", "-euc", calls)
            created = json.JSONDecoder().raw_decode(printed)[0]["data"]
            accepted = f"accepted calc_{created['uuid']}\n"
            assert wait_until(lambda: accepted in output.read_text(), seconds=60)
        stored = run(checkout, ".local/bin/psql", "-Atc", "SELECT count(*) FROM calculation_request")
        terminal = sourced(checkout)
    with make_run(checkout, **terminal) as log:
        terminal = sourced(checkout)
        for server in ("postgres", "rabbitmq"):
            os.kill(int((checkout / ".local" / f"{server}.pid").read_text()), signal.SIGKILL)
        assert wait_until(lambda: not trouble_of_rabbitmq(terminal["CALCULATOR_AMQP_URL"]), seconds=60)
        assert wait_until(lambda: is_ready(terminal["API_PROBES_URL"]), seconds=60)
        found = json.loads(run(checkout, "sh", "-euc", RETRIEVE.format(created["uuid"])))["data"]
        page = run(checkout, "curl", "-s", log.read_text().rpartition("\nOpen ")[2].split()[0])
    cleaned = run(checkout, *MAKE, "clean")

    assert (stored, printed.count('"code": 200,')) == ("1", 1)
    assert (found["uuid"], found["secret"]) == (created["uuid"], created["secret"])
    assert "The journey of a request" in page
    assert "Removed .local." in cleaned
    assert not {".local", ".venv"} & {path.name for path in checkout.iterdir()}


def test_packages_of_the_lock_suit_each_other():
    """They are installed without resolving dependencies, so this is not checked by itself."""
    command = [sys.executable, "-m", "uv", "pip", "check", "--python", sys.executable]
    checked = subprocess.run(command, capture_output=True, check=False)

    assert checked.returncode == 0, checked.stderr


def test_job_that_can_sign_a_release_runs_no_code_of_the_checkout():
    jobs: dict[str, Any] = {}
    for file in (CHECKOUT / ".github/workflows").glob("*.yml"):
        jobs |= msgspec.yaml.decode(file.read_bytes())["jobs"]
    (signing,) = (job for job in jobs.values() if "write" in job["permissions"].values())

    commands = "\n".join(step.get("run", "") for step in signing["steps"])
    assert "cosign sign" in commands
    assert not re.search(r"\bmake\b|python|pip\b|npm|kubectl|\./|\.github", commands)
