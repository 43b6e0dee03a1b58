"""The Compose file starts the same processes as the manifests, in an order that works."""

import re
import shutil
import subprocess

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.settings import ServiceSettings
from tests.deploy.manifests import (
    PROCESSES,
    WORKERS,
    Manifest,
    container_of,
    grace_seconds,
    pod_of,
    schema_container_of,
    workloads,
)
from worker.settings import WorkerSettings

FILE = CHECKOUT / "deploy" / "compose.yaml"


@pytest.fixture(scope="module")
def services():
    """Every service, by name."""
    found: dict[str, Manifest] = msgspec.yaml.decode(FILE.read_bytes())["services"]
    return found


def test_compose_accepts_the_file():
    """Neither of its two programs needs an engine to validate."""
    program = _compose()

    ended = subprocess.run(
        [*program, "--file", FILE, "config", "--quiet"], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stderr


def _compose() -> list[str]:
    for program in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(program[0]):
            asked = subprocess.run([*program, "version"], capture_output=True, check=False)
            if asked.returncode == 0:
                return program
    pytest.skip("Docker Compose is not installed: compose.yaml is not validated by it")


def test_processes_run_as_on_kubernetes(services):
    deployed = workloads("dev")
    user = pod_of(deployed["api"])["securityContext"]
    commands = {name: container_of(deployed[name])["args"] for name in PROCESSES}

    for name, command in [*commands.items(), ("schema", schema_container_of("dev")["args"])]:
        assert services[name]["command"] == command
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["user"] == f"{user['runAsUser']}:{user['runAsGroup']}"
    assert {services[name]["stop_grace_period"] for name in PROCESSES} == {f"{grace_seconds():.0f}s"}


def test_image_is_built_once_and_never_pulled(services):
    """Docker rejects two concurrent builds of one name."""
    ours = {name: one for name, one in services.items() if one["image"] == "calculation-requests"}

    assert ours.keys() == {*PROCESSES, "schema", "issuer"}
    assert [name for name, one in services.items() if "build" in one] == ["schema"]
    assert {one["pull_policy"] for one in ours.values()} == {"never"}


def test_every_service_waits_for_its_dependencies(services):
    waits = {
        name: {other: how["condition"] for other, how in service.get("depends_on", {}).items()}
        for name, service in services.items()
    }

    assert waits["schema"] == {"postgres": "service_healthy"}
    assert waits["api"]["schema"] == "service_completed_successfully"
    for name in WORKERS:
        assert waits[name]["schema"] == "service_completed_successfully"
        assert waits[name]["rabbitmq"] == "service_healthy"
    for name in (*PROCESSES, "postgres", "rabbitmq"):
        assert "healthcheck" in services[name]


def test_settings_are_complete_and_the_api_gets_no_broker(services):
    msgspec.convert(services["api"]["environment"], ServiceSettings, strict=False)
    for name in WORKERS:
        msgspec.convert(services[name]["environment"], WorkerSettings, strict=False)
    assert not services["api"]["environment"].keys() & {"AMQP_URL", "SMTP_URL"}


def test_nothing_listens_beyond_this_machine(services):
    ports = [port for service in services.values() for port in service.get("ports", [])]

    assert ports
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)
