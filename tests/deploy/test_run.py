"""`make run` without its servers: its errors, its keys, and the environment of its processes."""

import os
import socket
import stat
import subprocess
import sys

import pytest

from deploy.local import environment, keys, stack
from deploy.local.environment import Ports
from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from deploy.local.run import port_from

AWKWARD = {
    "PLAIN": "value",
    "QUOTES": "it's \"quoted\" twice ''",
    "DOLLAR": "$HOME `id` $(id) \\ \\n",
    "BLANKS": "  two  blanks\tand a tab ",
    "EMPTY": "",
    "MARKS": "!#&;|<>*?~[]{}=",
    "WORDS": "Zürich £ 数",
}


def test_port_in_use_is_one_line_that_says_what_to_do(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = Ports(api=port, worker=free_port(), smtp=free_port())

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

    assert (ended.returncode, ended.stderr) == (1, "PORT must be a number from 1 to 65535.\n")


def test_values_reach_a_shell_and_are_read_back_unchanged_and_only_their_owner_can_read_them(tmp_path):
    file = tmp_path / "env"
    environment.write(file, AWKWARD)

    script = f'. "{file}"; exec env -0'
    printed = subprocess.run(["sh", "-euc", script], capture_output=True, check=True).stdout  # noqa: S607
    seen = dict(entry.split("=", 1) for entry in printed.decode().split("\0") if "=" in entry)

    assert {name: seen[name] for name in AWKWARD} == AWKWARD
    assert environment.read(file) == AWKWARD
    assert environment.read(tmp_path / "none") == {}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_only_the_worker_gets_broker_and_mail_server(tmp_path, monkeypatch):
    monkeypatch.setenv("AMQP_URL", "amqp://from-the-shell")
    ports = Ports(api=8000, worker=8001, smtp=8002)
    given = environment.variables(tmp_path, ports, database_url="postgresql://d", amqp_url="amqp://q")

    api = environment.of_api(given, ports.api)
    worker = environment.of_worker(given, ports.worker)

    assert not {"AMQP_URL", "SMTP_URL", "MAIL_FROM"} & api.keys()
    assert (api["PORT"], api["HOST"], api["DATABASE_URL"]) == ("8000", "127.0.0.1", "postgresql://d")
    assert (worker["AMQP_URL"], worker["SMTP_URL"]) == ("amqp://q", "smtp://127.0.0.1:8002")
    assert worker["HEALTH_PORT"] == "8001"


def test_keys_are_made_once_and_only_their_owner_can_read_them(tmp_path):
    private, public, ring = (tmp_path / name for name in ("key.pem", "jwks.json", "request-secret-keys"))

    def make() -> tuple[str, ...]:
        keys.write_signing_key(private, public)
        return private.read_text(), public.read_text(), keys.request_secret_keys(ring)

    assert make() == make()
    assert {stat.S_IMODE(file.stat().st_mode) for file in (private, ring)} == {0o600}
    assert '"d"' not in public.read_text()
