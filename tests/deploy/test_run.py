"""`make run` without its servers: its errors, its keys, and the environment of its processes."""

import os
import re
import signal
import smtplib
import socket
import stat

import pytest

from deploy.local import environment, keys, stack
from deploy.local.environment import Ports
from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import secret_in
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import Program, running
from deploy.local.machine.waiting import wait_until
from deploy.local.servers import clients
from deploy.local.servers.server import Server
from deploy.local.stack import Stack
from tests.deploy.mail_catching import mail_catcher
from tests.deploy.pages import WORKER, code_blocks


def test_port_in_use_is_one_line_that_says_what_to_do(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = {name: free_port() for name in ("api_probes", "worker", "smtp", "journey")}
        ports = Ports(api=port, **free)

        with pytest.raises(LocalStackError) as refusal, stack.running_stack(place, ports):
            pass

    assert str(refusal.value) == (
        f"Port {port} cannot be used (Address already in use): choose another with PORT={port + 1} make run."
    )


def test_process_that_died_is_started_again_and_a_container_that_died_ends_the_run(place, reports):
    place.folder.mkdir()
    program = Program(
        name="Postgres server",
        command=["sleep", "60"],
        environment=os.environ,
        folder=place.folder,
        log=place.folder / "postgres.log",
    )
    with running(program) as process:
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: process.trouble() is not None, seconds=30)
        Stack({}, [], [process], "").look_after(place)
        assert process.trouble() is None
        assert (place.folder / "postgres.pid").read_text() == f"{process.pid}\n"

    assert reports == [f"The Postgres server was killed by SIGKILL. Started again as process {process.pid}."]
    container = Server("postgresql://", trouble=lambda: "The Postgres container was removed.")
    with pytest.raises(LocalStackError, match=r"removed\. Run `make run` again\."):
        Stack({}, [container], [], "").look_after(place)


def test_two_addresses_are_refused_by_the_mail_server(tmp_path):
    with mail_catcher(tmp_path) as port, smtplib.SMTP("127.0.0.1", port) as client:
        client.ehlo()
        client.mail("from@example.com")
        mailboxes = ("perm-fail", "temp-fail", "ada")
        replies = [client.rcpt(f"{mailbox}@example.test")[0] for mailbox in mailboxes]

    assert replies == [550, 451, 250]


def test_account_that_is_made_has_the_rights_on_the_page():
    page = code_blocks(WORKER, "First queue to first calculation", "sh")[-1]

    assert re.findall(r"'(\^.*?)'", page) == list(clients.RIGHTS.values())


def test_only_the_worker_gets_broker_and_mail_server_and_the_journey_no_database(tmp_path, monkeypatch):
    for variable in ("AMQP_URL", "LD_LIBRARY_PATH", "SSL_CERT_FILE"):
        monkeypatch.setenv(variable, "from the shell")
    ports = Ports(api=8000, worker=8001, smtp=8002, journey=8003, api_probes=8004)
    given = environment.variables(tmp_path, ports, database_url="postgresql://d", amqp_url="amqp://q")

    api = environment.of_api(given, ports)
    worker = environment.of_worker(given, ports.worker)
    journey = environment.of_journey(given, ports.journey)

    assert not {"AMQP_URL", "SMTP_URL", "MAIL_FROM"} & api.keys()
    assert (api["PORT"], api["HOST"], api["DATABASE_URL"]) == ("8000", "127.0.0.1", "postgresql://d")
    assert (worker["AMQP_URL"], worker["SMTP_URL"]) == ("amqp://q", "smtp://127.0.0.1:8002")
    assert (api["HEALTH_PORT"], worker["HEALTH_PORT"]) == ("8004", "8001")
    assert journey.keys() == {"BASE_URL", "APP_URL", "MAIL_DIR", "PORT", "LD_LIBRARY_PATH", "SSL_CERT_FILE"}
    assert given["APP_URL"] == f"http://127.0.0.1:{journey['PORT']}"
    monkeypatch.setenv("APP_URL", "https://mine.example.com")
    given = environment.variables(tmp_path, ports, database_url="postgresql://d", amqp_url="amqp://q")
    assert given["APP_URL"] == "https://mine.example.com"


def test_keys_are_made_once_and_only_their_owner_can_read_them(tmp_path):
    private, public, ring = (tmp_path / name for name in ("key.pem", "jwks.json", "request-secret-key"))

    def make() -> tuple[str, ...]:
        keys.write_signing_key(private, public)
        return private.read_text(), public.read_text(), secret_in(ring)

    assert make() == make()
    assert {stat.S_IMODE(file.stat().st_mode) for file in (private, ring)} == {0o600}
    assert '"d"' not in public.read_text()
