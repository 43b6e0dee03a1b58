"""The Compose file starts the same processes as the manifests, with complete settings."""

import re
import shutil
import socket
import subprocess
from pathlib import Path

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from tests.deploy.manifests import (
    OF_ALL,
    OF_BOUNCES,
    PROCESSES,
    SECRETS,
    SETTINGS,
    container_of,
    grace_seconds,
    pod_of,
    schema_container_of,
    workloads,
)

FILE = CHECKOUT / "deploy" / "compose.yaml"


@pytest.fixture(scope="module")
def services():
    return msgspec.yaml.decode(FILE.read_bytes())["services"]


def test_compose_accepts_the_file():
    """Neither of its two programs needs an engine to validate."""
    for program in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(program[0]) and run(*program, "version").returncode == 0:
            ended = run(*program, "--file", FILE, "config", "--quiet")
            assert ended.returncode == 0, ended.stderr
            return
    pytest.skip("Docker Compose is not installed: compose.yaml is not validated by it")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_processes_run_as_on_kubernetes_and_as_the_user_of_the_image(services):
    deployed = workloads("dev")
    user = pod_of(deployed["api"])["securityContext"]
    restricted = {"user": f"{user['runAsUser']}:{user['runAsGroup']}", "read_only": True, "cap_drop": ["ALL"]}
    containers = {name: container_of(deployed[name]) for name in PROCESSES}

    assert f"\nUSER {restricted['user']}\n" in (FILE.parent / "Dockerfile").read_text()
    assert len({container["image"] for container in containers.values()}) == 1
    for name, container in {**containers, "schema": schema_container_of("dev")}.items():
        assert services[name] == services[name] | restricted | {"command": container["args"]}
    assert {services[name]["stop_grace_period"] for name in PROCESSES} == {f"{grace_seconds():.0f}s"}


def test_settings_are_complete_and_each_process_gets_only_the_secrets_that_it_uses(services):
    for name in PROCESSES:
        given = services[name]["environment"]
        msgspec.convert(given, SETTINGS[name], strict=False)
        assert given.keys() & OF_ALL == SECRETS[name] - {"LISTEN_DATABASE_URL", *OF_BOUNCES}


def test_health_checks_ask_the_probes_of_their_process(services):
    for name in PROCESSES:
        port = services[name]["environment"]["HEALTH_PORT"]
        assert f"http://127.0.0.1:{port}/readyz" in str(services[name]["healthcheck"]["test"])


def test_rabbitmq_is_healthy_once_its_port_is_open(services):
    port = free_port()
    check = services["rabbitmq"]["healthcheck"]
    _, *command = [word.replace("/5672", f"/{port}") for word in check["test"]]

    assert check["start_period"] == "120s"
    assert run(*command).returncode != 0
    with socket.create_server(("127.0.0.1", port)):
        assert run(*command).returncode == 0


def test_nothing_listens_beyond_this_machine(services):
    ports = [port for service in services.values() for port in service.get("ports", [])]

    assert ports
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)
