"""Every role that worker/process.py declares is deployed, reachable, watched and documented."""

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from tests.deploy.alerts import ALERTS
from tests.deploy.manifests import of_kind, the_one
from tests.deploy.pages import INSTALLATION, README, REFERENCE, rows
from tests.deploy.test_network_policy import SERVERS, is_open, ours
from worker.process import ROLES, Role
from worker.settings import WorkerSettings

COMPOSE = CHECKOUT / "deploy" / "compose.yaml"


def holds(name: str, role: Role) -> dict[str, bool]:
    """Return of each file whether it has what it must have of a role."""
    of_user = f"{name}-user-credentials"
    of_broker = {
        "deploy/k8s/components/topology/users.yaml": name in of_kind("production", "Permission"),
        "deploy/k8s/overlays/production/patches/users.yaml": of_user
        in str(of_kind("production", "Deployment").get(name)),
        "deploy/k8s/overlays/dev/made-up-secrets.env": f"{name.upper()}_AMQP_URL"
        in the_one("dev", "Secret", "calculation-requests")["data"],
    }
    needed = {each.encode_name for each in msgspec.structs.fields(role.settings)}
    listed = {
        row[0].strip("`") for process in ("both", "worker") for row in rows(REFERENCE, "Settings", process)
    }
    return (of_broker if "rabbitmq" in role.servers else {}) | {
        "deploy/k8s/base/workers.yaml": all(
            name in of_kind("dev", kind) for kind in ("Deployment", "PodDisruptionBudget")
        ),
        "deploy/k8s/components/*network-policy": all(
            is_open(overlay, ours(name), *servers[server])
            for overlay, servers in SERVERS.items()
            for server in role.servers
            if server in servers
        ),
        "deploy/k8s/components/monitoring/alerts.yaml": f'"role", "{name}"'
        in ALERTS["ProcessAbsent"]["expr"],
        "deploy/compose.yaml": name in msgspec.yaml.decode(COMPOSE.read_bytes())["services"],
        "README.md": f"`python -m worker {name}`"
        in {row[0] for row in rows(README, "The processes", "command")},
        "deploy/README.md": name in {row[0] for row in rows(INSTALLATION, "Scaling", "| production")},
        "deploy/reference.md": needed <= listed,
    }


@pytest.mark.parametrize("name", ROLES)
def test_no_file_lacks_a_role(name):
    assert {f"{file} lacks {name}" for file, found in holds(name, ROLES[name]).items() if not found} == set()


class Undocumented(WorkerSettings, frozen=True, kw_only=True):
    """Settings of which the pages say nothing."""

    undocumented: int = 1


def test_role_that_was_added_only_to_the_declaration_is_missed_in_every_file():
    made_up = ROLES["notifications"]._replace(settings=Undocumented)

    assert {file for file, found in holds("made-up", made_up).items() if found} == set()
