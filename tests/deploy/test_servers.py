"""Where Postgres and RabbitMQ come from, and in which order they are looked up."""

import asyncio
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
from deploy.local.machine.ports import accepts, free_port
from deploy.local.servers import lookup as servers
from deploy.local.servers import rabbitmq_node as rabbitmq
from deploy.local.servers.containers import Image, container, postgres_image, rabbitmq_image
from deploy.local.servers.server import NotHere, trouble_of_rabbitmq
from tests.harness.servers import KillableBroker


@pytest.mark.parametrize(
    ("variable", "url", "server"),
    [
        ("DATABASE_URL", "postgresql://me:s3cret@127.0.0.1:{port}/db", servers.postgres),
        ("AMQP_URL", "amqp://me:s3cret@127.0.0.1:{port}/", servers.rabbitmq),
    ],
)
def test_unreachable_url_is_one_clear_line_without_its_password(variable, url, server, monkeypatch, place):
    port = free_port()
    monkeypatch.setenv(variable, url.format(port=port))

    with pytest.raises(LocalStackError) as refusal, server(place):
        pass

    text = str(refusal.value)
    assert re.fullmatch(rf"{variable} is set, but .* cannot be used there .*", text)
    assert "s3cret" not in text


@pytest.mark.long
@pytest.mark.parametrize(
    "image", [postgres_image(keep=False), rabbitmq_image()], ids=["postgres", "rabbitmq"]
)
def test_server_runs_in_a_container_until_it_is_no_longer_needed(image: Image, place, reports):
    try:
        with container(image, place) as server:
            assert (image.trouble_at(server.url), server.trouble()) == (None, None)
    except NotHere as reason:
        pytest.skip(str(reason) or "no Docker engine answers")

    assert reports[-1].startswith(f"{image.server} runs in a container of {image.name}, port ")
    assert image.trouble_at(server.url)


def test_url_in_the_environment_comes_first(monkeypatch, postgres_server, place, reports):
    monkeypatch.setenv("DATABASE_URL", postgres_server)

    with servers.postgres(place) as given:
        assert given.url == postgres_server

    assert reports == []


def test_broker_lets_in_only_those_who_can_read_its_password(broker_start):
    broker = broker_start.result()
    if broker.process is None:
        pytest.skip("not started by this checkout")
    server = urlsplit(broker.url)

    assert trouble_of_rabbitmq(f"amqp://guest:guest@127.0.0.1:{server.port}/")
    folder = broker.process.program.folder
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
