"""The environment of processes and of users' shells."""

import stat
import subprocess
from pathlib import Path

from deploy.local import environment, keys
from deploy.local.environment import Ports

PORTS = Ports(api=8000, worker=8001, smtp=8002)
AWKWARD = {
    "PLAIN": "value",
    "QUOTES": "it's \"quoted\" twice ''",
    "DOLLAR": "$HOME `id` $(id) \\ \\n",
    "BLANKS": "  two  blanks\tand a tab ",
    "EMPTY": "",
    "MARKS": "!#&;|<>*?~[]{}=",
    "WORDS": "Zürich £ 数",
}


def variables(folder: Path) -> dict[str, str]:
    return environment.variables(folder, PORTS, database_url="postgresql://d", amqp_url="amqp://q")


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

    api = environment.of_api(variables(tmp_path), PORTS.api)
    worker = environment.of_worker(variables(tmp_path), PORTS.worker)

    assert not {"AMQP_URL", "SMTP_URL", "MAIL_FROM"} & api.keys()
    assert (api["PORT"], api["HOST"], api["DATABASE_URL"]) == ("8000", "127.0.0.1", "postgresql://d")
    assert (worker["AMQP_URL"], worker["SMTP_URL"]) == ("amqp://q", "smtp://127.0.0.1:8002")
    assert worker["HEALTH_PORT"] == "8001"


def test_request_secrets_stay_valid_over_runs(tmp_path):
    first = variables(tmp_path)["REQUEST_SECRET_KEYS"]

    assert variables(tmp_path)["REQUEST_SECRET_KEYS"] == first
    assert stat.S_IMODE((tmp_path / "request-secret-keys").stat().st_mode) == 0o600


def test_signing_key_is_made_once_and_its_private_part_kept_private(tmp_path):
    private, public = tmp_path / "key.pem", tmp_path / "jwks.json"
    keys.write_signing_key(private, public)
    first = private.read_bytes(), public.read_text()

    keys.write_signing_key(private, public)

    assert (private.read_bytes(), public.read_text()) == first
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert '"d"' not in public.read_text()
