"""`make run` without its servers: its errors, its keys, and the environment of its processes."""

import itertools
import json
import os
import re
import signal
import smtplib
import socket
import stat
import subprocess
import sys

import pytest

from deploy.local import clean, environment, keys, stack
from deploy.local.environment import Ports
from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import Process, Program, running
from deploy.local.machine.waiting import wait_until
from deploy.local.mail_catcher import newest
from deploy.local.run import port_from
from deploy.local.servers import clients
from deploy.local.servers.server import Server
from deploy.local.stack import Stack
from deploy.local.story import Story
from tests.deploy.mail_catching import mail_catcher
from tests.deploy.pages import WORKER, code_blocks
from tests.deploy.shells import sourced

SERVED = {"event": "request_served", "method": "POST", "status": 200, "uuid": "req_1"}
SENT = {"event": "email_handled", "outcome": "sent", "smtp_code": 250, "uuid": "req_1"}
REFUSED = SENT | {"outcome": "failed", "smtp_code": 550, "uuid": "req_2"}
CALCULATED = {"event": "message_handled", "calculation_id": "calc_1", "uuid": "req_1"}

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
        ports = Ports(api=port, worker=free_port(), smtp=free_port(), journey=free_port())

        with pytest.raises(LocalStackError) as refusal, stack.running_stack(place, ports):
            pass

    assert str(refusal.value) == (
        f"Port {port} cannot be used (Address already in use): choose another with PORT={port + 1} make run."
    )


@pytest.mark.parametrize(("port", "other"), [(80, 8001), (8010, 8011)])
def test_port_that_is_advised_needs_no_root(port, other, place, monkeypatch):
    monkeypatch.setattr("deploy.local.machine.ports.trouble", lambda _: "Permission denied")
    ports = Ports(api=port, worker=free_port(), smtp=free_port(), journey=free_port())

    with pytest.raises(
        LocalStackError, match=rf"\(Permission denied\): choose another with PORT={other} make run"
    ):
        stack.running_stack(place, ports).__enter__()


def test_two_equal_ports_are_refused(place):
    port = free_port()
    ports = Ports(api=port, worker=free_port(), smtp=free_port(), journey=port)

    with pytest.raises(LocalStackError, match=f"PORT and JOURNEY_PORT are both {port}"):
        stack.running_stack(place, ports).__enter__()


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


def test_process_that_cannot_start_ends_the_run_with_the_end_of_its_log(place):
    program = Program(
        name="worker",
        command=["sh", "-c", "echo no such setting; exit 1"],
        environment=os.environ,
        folder=CHECKOUT,
        log=place.folder / "worker.log",
    )

    def look_after(process: Process) -> None:
        for _ in range(20):
            assert wait_until(lambda: process.trouble() is not None, seconds=30)
            Stack({}, [], [process], "").look_after(place)

    with running(program) as process, pytest.raises(LocalStackError) as ended:
        look_after(process)

    assert re.fullmatch(r"(?s)The worker exited with status 1\. .*\.log:.*no such setting", str(ended.value))


def test_terminal_that_has_read_the_addresses_of_a_run_can_start_all_later_ones(tmp_path, monkeypatch):
    made = {"AMQP_URL": "amqp://made-here", "MAIL_FROM": "me@example.com", "APP_URL": "http://made-here"}
    monkeypatch.setenv("MAIL_FROM", "me@example.com")  # the user's own
    environment.write(tmp_path / "env", made)
    terminal = sourced(tmp_path / "env") | {"APP_URL": "https://mine.example.com"}

    for run in range(3):
        for name in ("MADE_BY_MAKE_RUN", *made):
            monkeypatch.setenv(name, terminal[name])
        environment.forget()

        assert not {"AMQP_URL", "MADE_BY_MAKE_RUN"} & os.environ.keys()
        assert os.environ["MAIL_FROM"] == "me@example.com"
        assert os.environ["APP_URL"] == "https://mine.example.com"
        environment.write(tmp_path / "env", made | {"AMQP_URL": f"amqp://made-by-run-{run}"})


def test_terminal_shows_each_request_email_and_calculation_once(tmp_path):
    (tmp_path / "mail").mkdir()
    (tmp_path / "logs").mkdir()
    mail = tmp_path / "mail" / "1.eml"
    mail.write_text("Message-ID: <req_1.request.created.1@example.com>")
    api, worker = (tmp_path / "logs" / name for name in ("api.log", "worker.log"))
    api.write_text("Traceback\n" + json.dumps(SERVED) + "\n" + json.dumps(SERVED | {"method": "GET"}) + "\n")
    worker.write_text(json.dumps(SENT) + "\n" + json.dumps(CALCULATED)[:20])
    story = Story(tmp_path)

    told = [*itertools.islice(story.go_on(), 1), *story.go_on()]
    with worker.open("a") as log:
        log.write(json.dumps(CALCULATED)[20:] + "\n" + json.dumps(REFUSED) + "\n")

    assert told == ["req_1: stored", f"req_1: e-mailed, {mail}"]
    assert list(story.go_on()) == ["req_1: calculated, calc_1", "req_2: e-mail failed, reply 550"]
    assert list(story.go_on()) == []


def test_two_addresses_are_refused_by_the_mail_server(tmp_path):
    with mail_catcher(tmp_path) as port, smtplib.SMTP("127.0.0.1", port) as client:
        client.ehlo()
        client.mail("from@example.com")
        mailboxes = ("perm-fail", "temp-fail", "ada")
        replies = [client.rcpt(f"{mailbox}@example.test")[0] for mailbox in mailboxes]

    assert replies == [550, 451, 250]


def test_mail_that_cannot_be_written_is_refused_for_now_and_kept_later(tmp_path):
    folder = tmp_path / "mail"
    with mail_catcher(folder) as port, smtplib.SMTP("127.0.0.1", port) as client:
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(smtplib.SMTPDataError) as refusal:
            client.sendmail("from@example.com", ["ada@example.test"], "Subject: A\n\nB")
        folder.mkdir()
        client.sendmail("from@example.com", ["ada@example.test"], "Subject: A\n\nB")

    assert refusal.value.smtp_code == 451
    assert refusal.value.smtp_error == b"4.3.0 Not kept: No such file or directory"
    assert len([*folder.glob("*.eml")]) == 1


def test_newest_email_about_a_request_is_found_even_if_another_disappears(tmp_path):
    for number, uuid in enumerate(["req_1", "req_1", "req_10"]):
        (tmp_path / f"{number}.eml").write_text(f"Message-ID: <{uuid}.request.created.1@example.com>")
    (tmp_path / "3.eml").symlink_to("removed")

    found = newest(tmp_path, "req_1")

    assert found is not None
    assert found[0].name == "1.eml"
    assert newest(tmp_path, "req_2") is None


def test_account_that_is_made_has_the_rights_on_the_page():
    page = code_blocks(WORKER, "First queue to first calculation", "sh")[-1]

    assert re.findall(r"'(\^.*?)'", page) == list(clients.RIGHTS.values())


def test_clean_does_not_say_that_it_removed_what_it_could_not(tmp_path, monkeypatch, reports):
    file = tmp_path / "not-a-folder"
    file.touch()
    monkeypatch.setattr(clean, "LOCAL", file)

    with pytest.raises(FileExistsError):
        clean.main(reports.append)

    assert reports == []


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


def test_values_reach_a_shell_unchanged_and_only_their_owner_can_read_them(tmp_path):
    file = tmp_path / "env"
    environment.write(file, AWKWARD)

    seen = sourced(file)

    assert {name: seen[name] for name in AWKWARD} == AWKWARD
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_only_the_worker_gets_broker_and_mail_server_and_the_journey_no_database_and_no_key(
    tmp_path, monkeypatch
):
    for variable in ("AMQP_URL", "LD_LIBRARY_PATH", "SSL_CERT_FILE"):
        monkeypatch.setenv(variable, "from the shell")
    ports = Ports(api=8000, worker=8001, smtp=8002, journey=8003)
    given = environment.variables(tmp_path, ports, database_url="postgresql://d", amqp_url="amqp://q")

    api = environment.of_api(given, ports.api)
    worker = environment.of_worker(given, ports.worker)
    journey = environment.of_journey(given, ports.journey)

    assert not {"AMQP_URL", "SMTP_URL", "MAIL_FROM"} & api.keys()
    assert (api["PORT"], api["HOST"], api["DATABASE_URL"]) == ("8000", "127.0.0.1", "postgresql://d")
    assert (worker["AMQP_URL"], worker["SMTP_URL"]) == ("amqp://q", "smtp://127.0.0.1:8002")
    assert worker["HEALTH_PORT"] == "8001"
    assert journey.keys() == {"BASE_URL", "APP_URL", "MAIL_DIR", "PORT", "LD_LIBRARY_PATH", "SSL_CERT_FILE"}
    assert given["APP_URL"] == f"http://127.0.0.1:{journey['PORT']}"
    monkeypatch.setenv("APP_URL", "https://mine.example.com")
    given = environment.variables(tmp_path, ports, database_url="postgresql://d", amqp_url="amqp://q")
    assert given["APP_URL"] == "https://mine.example.com"


def test_keys_are_made_once_and_only_their_owner_can_read_them(tmp_path):
    private, public, ring = (tmp_path / name for name in ("key.pem", "jwks.json", "request-secret-keys"))

    def make() -> tuple[str, ...]:
        keys.write_signing_key(private, public)
        return private.read_text(), public.read_text(), keys.request_secret_keys(ring)

    assert make() == make()
    assert {stat.S_IMODE(file.stat().st_mode) for file in (private, ring)} == {0o600}
    assert '"d"' not in public.read_text()
