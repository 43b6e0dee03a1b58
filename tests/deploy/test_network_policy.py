"""Which pods can reach which, by the rules that a network plugin applies."""

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Any

import msgspec
import pytest

from tests.deploy.manifests import PROCESSES, Manifest, container_of, of_kind, workloads
from worker.process import ROLES

HERE = "calculation-requests"
NAMES = {"http": 8000, "health": 8001, "metrics": 9187, "prometheus-tls": 15691}


class Peer(msgspec.Struct, frozen=True):
    """A pod of a namespace, with its labels; without labels, an address outside of the cluster."""

    namespace: str
    labels: Mapping[str, str]
    address: str = ""


OF_APP = "app.kubernetes.io/"
PEERS = {
    **{
        name: Peer(HERE, {f"{OF_APP}name": HERE, f"{OF_APP}component": name})
        for name in (*PROCESSES, "operator")  # the pods of commands
    },
    "pooler": Peer(HERE, {"cnpg.io/poolerName": "postgres-pooler", "cnpg.io/podRole": "pooler"}),
    "postgres": Peer(HERE, {"cnpg.io/cluster": "postgres", "cnpg.io/podRole": "instance"}),
    "rabbitmq": Peer(HERE, {f"{OF_APP}name": "rabbitmq", f"{OF_APP}component": "rabbitmq"}),
    "dns": Peer("kube-system", {"k8s-app": "kube-dns"}),
    "openshift's dns": Peer("openshift-dns", {"dns.operator.openshift.io/daemonset-dns": "default"}),
    "node's cache of names": Peer("", {}, "169.254.20.10"),
    "another team": Peer("another-team", {"app": "crm"}),
    "ingress": Peer("gateways", {"app": "ingress"}),
    "prometheus": Peer("monitoring", {"app": "prometheus"}),
    "collector of traces": Peer("monitoring", {"app": "collector"}),
    "keda": Peer("keda", {"app": "keda-operator"}),
    "stranger": Peer("elsewhere", {"app": "curl"}),
    "neighbour": Peer(HERE, {"app": "curl"}),
    "outside": Peer("", {}, "203.0.113.7"),
}
# Labels of namespaces beside their name, as deploy/README.md asks for them.
LABELS_OF_NAMESPACES = {
    "gateways": {"calculation-requests/callers": "true"},
    "another-team": {"calculation-requests/events": "true"},
}
# The servers that a role in worker/process.py may name: where they are in an overlay.
OUTSIDE = {"mail server": "outside:587", "mailbox": "outside:993", "https": "outside:443"}
SERVERS = {
    "external": {**OUTSIDE, "rabbitmq": "outside:5671"},
    "production": {**OUTSIDE, "rabbitmq": "rabbitmq:5671", "direct postgres": "postgres:5432"},
}
# EACH stands for each process, and ANY also for the pods of commands.
ALLOWED = {
    "any overlay": ["ingress → api:8000", "api → outside:443", "prometheus → EACH:8001"],
    "external": ["ANY → outside:5432", "operator → outside:5671"],
    "production": [
        *("ANY → dns:53", "ANY → openshift's dns:5353", "ANY → node's cache of names:53"),
        *("ANY → pooler:5432", "pooler → postgres:5432", "postgres → postgres:5432"),
        *("EACH → collector of traces:4318", "another team → rabbitmq:5671", "rabbitmq → rabbitmq:25672"),
        "api → postgres:5432",  # to apply the schema
        *("operator → postgres:5432", "operator → rabbitmq:5671"),
        *("operator → outside:465", "operator → outside:443"),  # the servers that `doctor` checks
        *("keda → postgres:5432", "keda → rabbitmq:15671"),
        *("prometheus → postgres:9187", "prometheus → rabbitmq:15691"),
    ],
}
DENIED = {
    "any overlay": ["neighbour → api:8000", "prometheus → api:8000", "neighbour → EACH:8001"],
    "external": ["api → outside:5671", "relay → outside:5672"],
    "production": [
        *("another team → rabbitmq:5672", "relay → rabbitmq:5672"),  # in the clear
        *("api → rabbitmq:5671", "api → outside:587", "ingress → EACH:8001", "neighbour → pooler:5432"),
        *("stranger → operator:8000", "stranger → api:8000", "stranger → postgres:5432"),
        "stranger → rabbitmq:5671",
    ],
}


@pytest.mark.parametrize("overlay", SERVERS)
def test_needed_flows_are_open_and_others_are_closed(overlay):
    needed, closed = (
        {
            flow.replace("EACH", name).replace("ANY", name)
            for flow in (*table["any overlay"], *table[overlay])
            for name in (*PROCESSES, *(["operator"] if "ANY" in flow else []))
        }
        for table in (ALLOWED, DENIED)
    )
    for name, role in ROLES.items():
        for server, where in SERVERS[overlay].items():
            # Any worker may reach RabbitMQ, and needs a user there.
            is_needed = server in {*role.servers, "rabbitmq"}
            (needed if is_needed else closed).add(f"{name} → {where}")

    found = {flow for flow in needed | closed if is_open(overlay, flow)}
    assert found == needed, "deploy/k8s/components/*network-policy"
    ports = [port for name in PROCESSES for port in container_of(workloads(overlay)[name])["ports"]]
    assert all(NAMES[port["name"]] == port["containerPort"] for port in ports)


def is_open(overlay: str, flow: str) -> bool:
    """Return whether the policies of an overlay allow a connection."""
    given = [policy["spec"] for policy in of_kind(overlay, "NetworkPolicy").values()]
    sender, _, target = flow.partition(" → ")
    receiver, _, port = target.partition(":")
    source, server = PEERS[sender], PEERS[receiver]
    is_sent = _lets(given, source, ("Egress", "to"), server, int(port))
    return is_sent and _lets(given, server, ("Ingress", "from"), source, int(port))


def _lets(given: list[Manifest], pod: Peer, direction: tuple[str, str], other: Peer, port: int) -> bool:
    """Return whether the policies of *pod* allow a connection to or from *other*."""
    kind, side = direction
    selecting = (policy for policy in given if _selects(policy["podSelector"], pod.labels))
    policies = [policy for policy in selecting if kind in policy["policyTypes"]]
    if pod.namespace != HERE or not policies:
        return True
    return any(
        port in {NAMES.get(str(one["port"]), one["port"]) for one in rule.get("ports", [{"port": port}])}
        and (side not in rule or any(_is(peer, other) for peer in rule[side]))
        for policy in policies
        for rule in policy.get(kind.lower(), [])
    )


def _is(peer: Manifest, other: Peer) -> bool:
    if other.address or "ipBlock" in peer:
        block = ip_network(peer.get("ipBlock", {"cidr": "0.0.0.0/32"})["cidr"])
        return bool(other.address) and ip_address(other.address) in block
    name = "kubernetes.io/metadata.name"
    namespace = {name: other.namespace, **LABELS_OF_NAMESPACES.get(other.namespace, {})}
    return _selects(peer.get("namespaceSelector", {"matchLabels": {name: HERE}}), namespace) and _selects(
        peer.get("podSelector", {}), other.labels
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    is_in = {"In": True, "NotIn": False}
    return wanted.items() <= labels.items() and all(
        (labels.get(each["key"]) in each["values"]) == is_in[each["operator"]]
        for each in selector.get("matchExpressions", [])
    )
