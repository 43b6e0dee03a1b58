"""`make run`: where its servers come from, its child processes and their folders, its keys and its errors."""

import asyncio
import os
import re
import shutil
import signal
import smtplib
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deploy.local import environment, keys, stack
from deploy.local.environment import Ports
from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
from deploy.local.machine.folders import CHECKOUT, Claimed, Place, claimed, secret_in, working_folder
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.processes import Program, running
from deploy.local.machine.waiting import wait_until
from deploy.local.servers import clients, lookup
from deploy.local.servers import rabbitmq_node as rabbitmq
from deploy.local.servers.containers import container, postgres_image, rabbitmq_image
from deploy.local.servers.server import NotHere, Server, trouble_of_rabbitmq
from deploy.local.stack import Stack
from tests.deploy.pages import WORKER, code_blocks
from tests.harness.servers import KillableBroker, mail_catcher

SLEEP = "import time; print('began', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
# The sleeper is deaf before its parent dies.
START_AND_DIE = """
import os, sys, time
from pathlib import Path
from deploy.local.machine.folders import Place, working_folder
from deploy.local.machine.processes import Process, Program
with working_folder(Place(folder=Path(sys.argv[1])), "server") as folder:
    command, where = [sys.executable, "-c", sys.argv[2]], {"folder": folder, "log": folder / "log"}
    sleeper = Process(Program(name="", command=command, environment=os.environ, stop_seconds=3, **where))
    while "began" not in sleeper.last_lines():
        time.sleep(0.01)
    time.sleep(0.2)
    os._exit(9)
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(folder=tmp_path / "servers")


def sleeper(folder: Path, code: str) -> Program:
    command, log = [sys.executable, "-c", code], folder / "sleeper.log"
    return Program(name="sleeper", command=command, environment=os.environ, folder=folder, log=log)


def test_program_ends_with_its_context_even_if_it_ignores_its_signal(tmp_path):
    with running(replace(sleeper(tmp_path, DEAF), stop_seconds=0.1)) as process:
        assert wait_until(lambda: "began" in process.last_lines(), seconds=30)
        assert process.trouble() is None

    assert process.trouble() == "The sleeper was killed by SIGKILL."


def test_folder_is_used_by_one_run_and_removed_unless_it_is_kept(place):
    with (
        working_folder(replace(place, keep=True), "server") as kept,
        pytest.raises(Claimed, match=r"server is in use by another process"),
        claimed(kept),
    ):
        pass
    with working_folder(place, "server") as one, working_folder(place, "server") as other:
        assert one != other
        (one / "data").write_text("not kept")

    assert list(place.folder.iterdir()) == [kept]


def test_folder_of_a_dead_run_is_in_use_until_its_deaf_program_is_killed_and_then_removed(place):
    subprocess.run([sys.executable, "-c", START_AND_DIE, place.folder, DEAF], cwd=CHECKOUT, check=False)
    (abandoned,) = place.folder.iterdir()
    ended: list[Path] = []

    with pytest.raises(Claimed), claimed(abandoned):
        pass
    with working_folder(place, "server", end=ended.append):
        assert ended == []
    with claimed(abandoned, seconds=30):
        pass
    with working_folder(place, "server", end=ended.append) as folder:
        assert (ended, list(place.folder.iterdir())) == ([abandoned], [folder])


def test_process_that_died_is_started_again_and_a_container_that_died_ends_the_run(place, capsys):
    place.folder.mkdir()
    with running(sleeper(place.folder, SLEEP)) as process:
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: process.trouble() is not None, seconds=30)
        Stack({}, [], [process], "").look_after(place)
        assert process.trouble() is None
        assert (place.folder / "sleeper.pid").read_text() == f"{process.pid}\n"

    reported = f"The sleeper was killed by SIGKILL. Started again as process {process.pid}.\n"
    assert capsys.readouterr().out == reported
    removed = Server("postgresql://", trouble=lambda: "The Postgres container was removed.")
    with pytest.raises(LocalStackError, match=r"removed\. Run `make run` again\."):
        Stack({}, [removed], [], "").look_after(place)


def test_port_in_use_is_one_line_that_says_what_to_do(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = {name: free_port() for name in ("api_probes", "worker", "smtp", "journey")}
        with pytest.raises(LocalStackError) as refusal, stack.running_stack(place, Ports(api=port, **free)):
            pass

    assert str(refusal.value) == (
        f"Port {port} cannot be used (Address already in use): choose another with PORT={port + 1} make run."
    )


def test_two_addresses_are_refused_by_the_mail_server(tmp_path):
    with mail_catcher(tmp_path) as port, smtplib.SMTP("127.0.0.1", port) as client:
        client.ehlo()
        client.mail("from@example.com")
        replies = [client.rcpt(f"{name}@example.test")[0] for name in ("perm-fail", "temp-fail", "ada")]

    assert replies == [550, 451, 250]


def test_account_that_is_made_has_the_rights_on_the_page():
    page = code_blocks(WORKER, "First queue to first calculation", "sh")[-1]

    assert re.findall(r"'(\^.*?)'", page) == list(clients.RIGHTS.values())


def test_only_the_worker_gets_broker_and_mail_server_and_the_journey_no_database(tmp_path, monkeypatch):
    for variable in ("AMQP_URL", "LD_LIBRARY_PATH", "SSL_CERT_FILE"):
        monkeypatch.setenv(variable, "from the shell")
    ports = Ports(api=8000, worker=8001, smtp=8002, journey=8003, api_probes=8004)
    urls = {"database_url": "postgresql://d", "amqp_url": "amqp://q"}
    given = environment.variables(tmp_path, ports, **urls)
    api, journey = environment.of_api(given, ports), environment.of_journey(given, ports.journey)

    assert not {"AMQP_URL", "SMTP_URL", "MAIL_FROM"} & api.keys()
    assert (api["HOST"], environment.of_worker(given, ports.worker)["AMQP_URL"]) == ("127.0.0.1", "amqp://q")
    assert journey.keys() == {"BASE_URL", "APP_URL", "MAIL_DIR", "PORT", "LD_LIBRARY_PATH", "SSL_CERT_FILE"}
    assert given["APP_URL"] == f"http://127.0.0.1:{journey['PORT']}"
    monkeypatch.setenv("APP_URL", "https://mine.example.com")
    assert environment.variables(tmp_path, ports, **urls)["APP_URL"] == "https://mine.example.com"


def test_keys_are_made_once_and_only_their_owner_can_read_them(tmp_path):
    private, public, ring = (tmp_path / name for name in ("key.pem", "jwks.json", "request-secret-key"))
    made = set()
    for _ in range(2):
        keys.write_signing_key(private, public)
        made.add((private.read_text(), public.read_text(), secret_in(ring)))

    assert len(made) == 1
    assert {stat.S_IMODE(file.stat().st_mode) for file in (private, ring)} == {0o600}
    assert '"d"' not in public.read_text()


def test_unreachable_url_is_one_clear_line_without_its_password(monkeypatch, place):
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:s3cret@127.0.0.1:{free_port()}/db")
    monkeypatch.setenv("AMQP_URL", f"amqp://me:s3cret@127.0.0.1:{free_port()}/")
    for variable, server in (("DATABASE_URL", lookup.postgres), ("AMQP_URL", lookup.rabbitmq)):
        with pytest.raises(LocalStackError) as refusal, server(place):
            pass

        assert re.fullmatch(rf"{variable} is set, but .* cannot be used there .*", str(refusal.value))
        assert "s3cret" not in str(refusal.value)


@pytest.mark.long
@pytest.mark.parametrize("image", [postgres_image(keep=False), rabbitmq_image()])
def test_server_runs_in_a_container_until_it_is_no_longer_needed(image, place, capsys):
    try:
        with container(image, place) as server:
            assert (image.trouble_at(server.url), server.trouble()) == (None, None)
    except NotHere as reason:
        pytest.skip(str(reason) or "no Docker engine answers")

    assert f"\n{image.server} runs in a container of {image.name}, port " in f"\n{capsys.readouterr().out}"
    assert image.trouble_at(server.url)


def test_broker_lets_in_only_those_who_can_read_its_password(broker_start):
    broker = broker_start.result()
    if broker.process is None:
        pytest.skip("not started by this checkout")
    server, folder = urlsplit(broker.url), broker.process.program.folder

    assert trouble_of_rabbitmq(f"amqp://guest:guest@127.0.0.1:{server.port}/")
    assert folder.stat().st_mode & 0o077 == 0
    assert server.password == (folder / "password").read_text().strip()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs Debian's apt")
def test_broker_runs_from_unpacked_packages(place, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "PACKAGES", tmp_path)
    monkeypatch.setattr(rabbitmq, "_installed_programs", lambda: None)
    with rabbitmq.rabbitmq_node(place) as server:
        assert server.process is not None
        assert trouble_of_rabbitmq(server.url) is None
        asyncio.run(KillableBroker(server, trouble_of_rabbitmq).clear_memory_alarm())  # with rabbitmqctl
        assert Path(f"/proc/{server.process.pid}/exe").resolve().is_relative_to(tmp_path)
        epmd_port = int(server.process.program.environment["ERL_EPMD_PORT"])
        assert accepts(epmd_port)

    assert not accepts(epmd_port)
