"""`make run`, as far as it needs no service: what it says when it cannot start."""

import os
import socket
import subprocess
import sys

import pytest

from deploy.local import environment, stack
from deploy.local.errors import LocalStackError
from deploy.local.folders import CHECKOUT, Place
from deploy.local.ports import free_port
from deploy.local.terminal import port_from


def test_port_in_use_is_one_line_that_says_what_to_do(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = environment.Ports(api=port, worker=free_port(), smtp=free_port())

        with pytest.raises(LocalStackError) as refusal, stack.running_stack(place, ports):
            pass

    assert str(refusal.value) == f"Port {port} is in use: choose another with PORT={port + 1} make run."


@pytest.mark.parametrize("value", ["abc", "0", "65536", "-1", "80.5"])
def test_port_that_is_none_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", value)

    with pytest.raises(LocalStackError, match="PORT must be a number from 1 to 65535"):
        port_from("PORT", default=8000)


def test_trouble_is_told_in_a_line_and_by_the_exit_status() -> None:
    command = [sys.executable, "-m", "deploy.local", "run"]
    settings = {**os.environ, "PORT": "no-port"}

    ended = subprocess.run(command, cwd=CHECKOUT, env=settings, capture_output=True, text=True, check=False)

    assert ended.returncode == 1
    assert ended.stderr == "PORT must be a number from 1 to 65535.\n"
