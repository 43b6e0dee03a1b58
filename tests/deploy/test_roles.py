"""Every role that worker/process.py declares is deployed, reachable, watched and documented."""

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from tests.deploy.alerts import ALERTS
from tests.deploy.manifests import of_kind, the_one
from tests.deploy.pages import INSTALLATION, README, rows
from tests.deploy.test_network_policy import PEERS, SERVERS, is_open
from worker.process import ROLES, Role


def holds(name: str, role: Role) -> dict[str, bool]:
    """Return of each file whether it has what it must have of a role."""
    workers = of_kind("production", "Deployment")
    secret = the_one("dev", "Secret", "calculation-requests")["data"]
    composed = msgspec.yaml.decode((CHECKOUT / "deploy" / "compose.yaml").read_bytes())["services"]
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
        "deploy/compose.yaml": name in composed,
        "README.md": f"`python -m worker {name}`" in processes,
        "deploy/README.md": name in {row[0] for row in rows(INSTALLATION, "Scaling", "| production")},
    }


@pytest.mark.parametrize("name", ROLES)
def test_no_file_lacks_a_role(name):
    assert {f"{file} lacks {name}" for file, found in holds(name, ROLES[name]).items() if not found} == set()


def test_role_that_was_added_only_to_the_declaration_is_missed_in_every_file():
    assert {file for file, found in holds("made-up", ROLES["notifications"]).items() if found} == set()
