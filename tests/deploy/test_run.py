"""`make run` without its servers: its errors when it cannot start, and the commands it prints."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys

import pytest

from deploy.local import environment, example, stack
from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from deploy.local.run import port_from
from service.identifiers import uuid_of


def test_port_in_use_is_one_line_that_says_what_to_do(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = environment.Ports(api=port, worker=free_port(), smtp=free_port())

        with pytest.raises(LocalStackError) as refusal, stack.running_stack(place, ports):
            pass

    assert str(refusal.value) == f"Port {port} is in use: choose another with PORT={port + 1} make run."


@pytest.mark.parametrize("value", ["abc", "0", "65536", "-1", "80.5"])
def test_invalid_port_is_refused_by_its_variable(value, monkeypatch):
    monkeypatch.setenv("PORT", value)

    with pytest.raises(LocalStackError, match="PORT must be a number from 1 to 65535"):
        port_from("PORT", default=8000)


def test_error_is_one_line_and_the_exit_status():
    command = [sys.executable, "-m", "deploy.local", "run"]
    settings = {**os.environ, "PORT": "no-port"}

    ended = subprocess.run(command, cwd=CHECKOUT, env=settings, capture_output=True, text=True, check=False)

    assert ended.returncode == 1
    assert ended.stderr == "PORT must be a number from 1 to 65535.\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_printed_commands_work_and_write_no_file(client, issuer, database, tmp_path):
    env_file, mail = tmp_path / "env", tmp_path / "1.eml"
    mail.write_text("the e-mail")
    environment.write(
        env_file, {"BASE_URL": str(client.base_url), "ACCESS_TOKEN": issuer.token(), "API_KEY": "none"}
    )
    commands = example.commands(str(env_file), str(tmp_path))

    shell = await asyncio.create_subprocess_exec(
        "sh", "-euc", commands, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    printed = (await shell.communicate())[0].decode()

    request_id = await database.fetchval("SELECT id FROM calculation_request")
    assert shell.returncode == 0, printed
    assert printed.count(f'"uuid":"{uuid_of(request_id)}"') == 2  # as created, and as retrieved
    assert printed.endswith("the e-mail")
    assert set(tmp_path.iterdir()) == {env_file, mail}
