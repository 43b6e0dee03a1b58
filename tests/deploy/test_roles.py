"""Each process is deployed, reachable, watched and documented, and the Compose file starts it, too."""

import shutil
import socket
import subprocess

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from tests.deploy import manifests
from tests.deploy.alerts import ALERTS
from tests.deploy.manifests import PROCESSES, container_of, of_kind, the_one
from tests.deploy.pages import INSTALLATION, README, rows
from tests.deploy.test_network_policy import PEERS, SERVERS, is_open
from worker.process import ROLES, Role

FILE = CHECKOUT / "deploy" / "compose.yaml"
SERVICES = msgspec.yaml.decode(FILE.read_bytes())["services"]


def test_compose_accepts_the_file():
    """Neither of its two programs needs an engine to validate."""
    for program in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(program[0]) and status(*program, "version") == 0:
            assert status(*program, "--file", str(FILE), "config", "--quiet") == 0
            return
    pytest.skip("Docker Compose is not installed: compose.yaml is not validated by it")


def status(*command: str) -> int:
    return subprocess.run(command, check=False).returncode


def test_processes_run_as_on_kubernetes_and_as_the_user_of_the_image():
    deployed = manifests.workloads("dev")
    user = manifests.pod_of(deployed["api"])["securityContext"]
    restricted = {"user": f"{user['runAsUser']}:{user['runAsGroup']}", "read_only": True, "cap_drop": ["ALL"]}
    containers = {name: container_of(deployed[name]) for name in PROCESSES}

    assert f"\nUSER {restricted['user']}\n" in (FILE.parent / "Dockerfile").read_text()
    assert len({container["image"] for container in containers.values()}) == 1
    for name, container in {**containers, "schema": manifests.schema_container_of("dev")}.items():
        assert SERVICES[name] == SERVICES[name] | restricted | {"command": container["args"]}


@pytest.mark.parametrize("name", PROCESSES)
def test_process_has_complete_settings_the_secrets_that_it_uses_and_a_health_check(name):
    given, secrets = SERVICES[name]["environment"], manifests.SECRETS[name]

    msgspec.convert(given, manifests.SETTINGS[name], strict=False)
    assert given.keys() & manifests.OF_ALL == secrets - {"LISTEN_DATABASE_URL", *manifests.OF_BOUNCES}
    assert f"http://127.0.0.1:{given['HEALTH_PORT']}/readyz" in str(SERVICES[name]["healthcheck"]["test"])
    assert SERVICES[name]["stop_grace_period"] == f"{manifests.grace_seconds():.0f}s"


def test_rabbitmq_is_healthy_once_its_port_is_open():
    check, port = SERVICES["rabbitmq"]["healthcheck"], free_port()
    command = [word.replace("/5672", f"/{port}") for word in check["test"][1:]]

    assert check["start_period"] == "120s"
    assert status(*command) != 0
    with socket.create_server(("127.0.0.1", port)):
        assert status(*command) == 0


def test_nothing_listens_beyond_this_machine():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]

    assert {port.partition(":")[0] for port in ports} == {"127.0.0.1"}


def holds(name: str, role: Role) -> dict[str, bool]:
    """Return of each file whether it has what it must have of a role."""
    workers = of_kind("production", "Deployment")
    secret = the_one("dev", "Secret", "calculation-requests")["data"]
    processes = {row[0] for row in rows(README, "The processes", "command")}
    flows = [
        (overlay, f"{name} → {servers[server]}")
        for overlay, servers in SERVERS.items()
        for server in {*role.servers} & servers.keys() - {"rabbitmq"}  # which any worker may reach
    ]
    of_broker = {
        "deploy/k8s/components/topology/users.yaml": name in of_kind("production", "Permission"),
        "deploy/k8s/overlays/production": f"{name}-user-credentials" in str(workers.get(name)),
        "deploy/k8s/overlays/dev/made-up-secrets.env": f"{name.upper()}_AMQP_URL" in secret,
    }
    return (of_broker if "rabbitmq" in role.servers else {}) | {
        "deploy/k8s/base/workers.yaml": name in workers and name in of_kind("dev", "PodDisruptionBudget"),
        "deploy/k8s/components/*network-policy": name in PEERS and all(is_open(*flow) for flow in flows),
        "deploy/k8s/components/monitoring/alerts.yaml": f'"{name}"' in ALERTS["ProcessAbsent"]["expr"],
        "deploy/compose.yaml": name in SERVICES,
        "README.md": f"`python -m worker {name}`" in processes,
        "deploy/README.md": name in {row[0] for row in rows(INSTALLATION, "Scaling", "| production")},
    }


@pytest.mark.parametrize("name", ROLES)
def test_no_file_lacks_a_role(name):
    assert not (lacking := [file for file, found in holds(name, ROLES[name]).items() if not found]), lacking


def test_role_that_was_added_only_to_the_declaration_is_missed_in_every_file():
    assert {file for file, found in holds("made-up", ROLES["notifications"]).items() if found} == set()
