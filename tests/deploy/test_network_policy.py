"""Which pods can reach which, by the rules that a network plugin applies."""

import ipaddress
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.deploy.manifests import PROCESSES, Manifest, container_of, of_kind, workloads
from worker.process import ROLES

OPERATOR = "operator"  # the pods of operators' commands
HERE = "calculation-requests"


class Peer(msgspec.Struct, frozen=True):
    """A pod of a namespace, with its labels; without labels, an address outside of the cluster."""

    namespace: str
    labels: Mapping[str, str]
    address: str = ""


def ours(component: str) -> Peer:
    return Peer(HERE, {"app.kubernetes.io/name": HERE, "app.kubernetes.io/component": component})


POOLER = Peer(HERE, {"cnpg.io/poolerName": "postgres-pooler", "cnpg.io/podRole": "pooler"})
POSTGRES = Peer(HERE, {"cnpg.io/cluster": "postgres", "cnpg.io/podRole": "instance"})
RABBITMQ = Peer(HERE, {"app.kubernetes.io/name": "rabbitmq", "app.kubernetes.io/component": "rabbitmq"})
DNS = Peer("kube-system", {"k8s-app": "kube-dns"})
DNS_OF_OPENSHIFT = Peer("openshift-dns", {"dns.operator.openshift.io/daemonset-dns": "default"})
NODE_LOCAL_DNS = Peer("", {}, "169.254.20.10")
TEAM = Peer("another-team", {"app": "crm"})
# Labels of namespaces beside their name, as deploy/README.md asks for them.
LABELS_OF_NAMESPACES = {
    "gateways": {"calculation-requests/callers": "true"},
    "another-team": {"calculation-requests/events": "true"},
}
INGRESS = Peer("gateways", {"app": "ingress"})
PROMETHEUS = Peer("monitoring", {"app": "prometheus"})
COLLECTOR = Peer("monitoring", {"app": "collector"})
KEDA = Peer("keda", {"app": "keda-operator"})
STRANGER = Peer("elsewhere", {"app": "curl"})
NEIGHBOUR = Peer(HERE, {"app": "curl"})
OUTSIDE = Peer("", {}, "203.0.113.7")
NAMES = {"http": 8000, "health": 8001, "metrics": 9187, "prometheus-tls": 15691}

OURS = (*PROCESSES, OPERATOR)
# The servers that a role in worker/process.py may name: where they are in an overlay, and their port.
SERVERS = {
    "external": {
        "rabbitmq": (OUTSIDE, 5671),
        "mail server": (OUTSIDE, 587),
        "mailbox": (OUTSIDE, 993),
        "https": (OUTSIDE, 443),
    },
}
SERVERS["production"] = SERVERS["external"] | {
    "rabbitmq": (RABBITMQ, 5671),
    "direct postgres": (POSTGRES, 5432),
}
# In every overlay.
ALLOWED = {
    "ingress → API": (INGRESS, ours("api"), 8000),
    "API → the issuer's keys": (ours("api"), OUTSIDE, 443),
    **{f"Prometheus → {name}": (PROMETHEUS, ours(name), 8001) for name in PROCESSES},
}
DENIED = {
    "neighbour → API": (NEIGHBOUR, ours("api"), 8000),
    "Prometheus → API's callers' port": (PROMETHEUS, ours("api"), 8000),
    **{f"neighbour → probes of {name}": (NEIGHBOUR, ours(name), 8001) for name in PROCESSES},
}
# With servers of your own, outside of the cluster.
ALLOWED_OUTSIDE = {
    **{f"{name} → Postgres": (ours(name), OUTSIDE, 5432) for name in OURS},
    "operator → RabbitMQ": (ours(OPERATOR), OUTSIDE, 5671),
}
DENIED_OUTSIDE = {
    "API → RabbitMQ": (ours("api"), OUTSIDE, 5671),
    "relay → RabbitMQ in the clear": (ours("relay"), OUTSIDE, 5672),
}
# With the engines in the cluster.
ALLOWED_INSIDE = {
    **{(f"{name} → OpenShift's DNS"): (ours(name), DNS_OF_OPENSHIFT, 5353) for name in OURS},
    **{(f"{name} → a cache of names on its node"): (ours(name), NODE_LOCAL_DNS, 53) for name in OURS},
    "another team → RabbitMQ": (TEAM, RABBITMQ, 5671),
    **{(f"{name} → DNS"): (ours(name), DNS, 53) for name in OURS},
    **{(f"{name} → pooler"): (ours(name), POOLER, 5432) for name in OURS},
    "operator → RabbitMQ": (ours(OPERATOR), RABBITMQ, 5671),
    **{f"{name} → collector of traces": (ours(name), COLLECTOR, 4318) for name in PROCESSES},
    "API → Postgres, to apply the schema": (ours("api"), POSTGRES, 5432),
    "operator → Postgres": (ours(OPERATOR), POSTGRES, 5432),
    "operator → mail server, which `doctor` checks": (ours(OPERATOR), OUTSIDE, 465),
    "operator → issuer, which `doctor` checks": (ours(OPERATOR), OUTSIDE, 443),
    "pooler → Postgres": (POOLER, POSTGRES, 5432),
    "Postgres → Postgres": (POSTGRES, POSTGRES, 5432),
    "RabbitMQ → RabbitMQ": (RABBITMQ, RABBITMQ, 25672),
    "KEDA → Postgres": (KEDA, POSTGRES, 5432),
    "KEDA → RabbitMQ's management": (KEDA, RABBITMQ, 15671),
    "Prometheus → Postgres": (PROMETHEUS, POSTGRES, 9187),
    "Prometheus → RabbitMQ": (PROMETHEUS, RABBITMQ, 15691),
}
DENIED_INSIDE = {
    "another team → RabbitMQ in the clear": (TEAM, RABBITMQ, 5672),
    "API → RabbitMQ": (ours("api"), RABBITMQ, 5671),
    "stranger → operator": (STRANGER, ours(OPERATOR), 8000),
    "relay → RabbitMQ in the clear": (ours("relay"), RABBITMQ, 5672),
    "API → mail server": (ours("api"), OUTSIDE, 587),
    **{f"ingress → probes of {name}": (INGRESS, ours(name), 8001) for name in PROCESSES},
    "stranger → API": (STRANGER, ours("api"), 8000),
    "stranger → Postgres": (STRANGER, POSTGRES, 5432),
    "stranger → RabbitMQ": (STRANGER, RABBITMQ, 5671),
    "neighbour → pooler": (NEIGHBOUR, POOLER, 5432),
}


FLOWS = [
    pytest.param(overlay, flow, is_needed, id=f"{overlay}: {name}")
    for overlay, is_needed, flows in (
        ("production", True, ALLOWED | ALLOWED_INSIDE),
        ("production", False, DENIED | DENIED_INSIDE),
        ("external", True, ALLOWED | ALLOWED_OUTSIDE),
        ("external", False, DENIED | DENIED_OUTSIDE),
    )
    for name, flow in flows.items()
] + [
    pytest.param(overlay, (ours(name), *where), server in role.servers, id=f"{overlay}: {name} → {server}")
    for overlay, servers in SERVERS.items()
    for name, role in ROLES.items()
    for server, where in servers.items()
    if server in role.servers or server != "rabbitmq"  # Any worker may reach it, and needs a user there.
]


@pytest.mark.parametrize(("overlay", "flow", "is_needed"), FLOWS)
def test_needed_flows_are_open_and_others_are_closed(overlay, flow, is_needed):
    assert is_open(overlay, *flow) == is_needed, "deploy/k8s/components/*network-policy"


def test_names_of_ports_are_those_of_the_containers():
    for process in PROCESSES:
        for port in container_of(workloads("production")[process])["ports"]:
            assert NAMES[port["name"]] == port["containerPort"]


def is_open(overlay: str, source: Peer, target: Peer, port: int) -> bool:
    """Return whether the policies of an overlay allow a connection."""
    given = [policy["spec"] for policy in of_kind(overlay, "NetworkPolicy").values()]
    is_sent = _lets(given, source, "Egress", "to", target, port)
    return is_sent and _lets(given, target, "Ingress", "from", source, port)


def _lets(given: list[Manifest], pod: Peer, direction: str, side: str, other: Peer, port: int) -> bool:
    """Return whether the policies of *pod* allow a connection to or from *other*."""
    policies = [
        policy
        for policy in given
        if direction in policy["policyTypes"] and _selects(policy["podSelector"], pod.labels)
    ]
    if pod.namespace != HERE or not policies:
        return True
    return any(
        port in {NAMES.get(str(one["port"]), one["port"]) for one in rule.get("ports", [{"port": port}])}
        and (side not in rule or any(_is(peer, other) for peer in rule[side]))
        for policy in policies
        for rule in policy.get(direction.lower(), [])
    )


def _is(peer: Manifest, other: Peer) -> bool:
    if block := peer.get("ipBlock"):
        network = ipaddress.ip_network(block["cidr"])
        return bool(other.address) and ipaddress.ip_address(other.address) in network
    if other.address:
        return False
    here = {"matchLabels": {"kubernetes.io/metadata.name": HERE}}
    namespace = {
        "kubernetes.io/metadata.name": other.namespace,
        **LABELS_OF_NAMESPACES.get(other.namespace, {}),
    }
    return _selects(peer.get("namespaceSelector", here), namespace) and _selects(
        peer.get("podSelector", {}), other.labels
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    conditions = selector.get("matchExpressions", [])
    is_in = {"In": True, "NotIn": False}
    return wanted.items() <= labels.items() and all(
        (labels.get(condition["key"]) in condition["values"]) == is_in[condition["operator"]]
        for condition in conditions
    )
