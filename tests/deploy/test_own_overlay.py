"""An overlay outside the checkout, made from the example, sets everything, without an edit of ours."""

import re
from pathlib import Path

import msgspec
import pytest

from tests.deploy.manifests import (
    K8S,
    OURS,
    WITH_ENGINES,
    Manifest,
    container_of,
    grace_seconds,
    overlay_outside,
    pod_of,
    valid_kinds,
    workloads,
)
from tests.deploy.pages import OPERATING, code_blocks

EXAMPLE = msgspec.yaml.decode((K8S / "example.yaml").read_bytes())
MONITORING = f"{OURS}/components/monitoring"
COMPONENTS = sorted(folder.parent.name for folder in K8S.glob("components/*/kustomization.yaml"))


def made(folder: Path, overlay: str, *parts: Manifest, monitored: bool = True) -> tuple[Manifest, ...]:
    """Render the example with the overlay of ours that it is made from, edited as its comments say."""
    without = overlay in WITH_ENGINES or not monitored
    components = [one for one in EXAMPLE["components"] if one != MONITORING or not without]
    first = {**EXAMPLE, "resources": [f"{OURS}/overlays/{overlay}"], "components": components}
    if not monitored:
        del first["transformers"]
    return overlay_outside(folder, first, *parts)


@pytest.mark.parametrize(
    ("overlay", "monitored"),
    [("external", False), ("external", True), *((overlay, True) for overlay in WITH_ENGINES)],
)
def test_it_replaces_everything_that_is_made_up_in_ours(overlay, monitored, tmp_path):
    text = msgspec.json.encode(made(tmp_path, overlay, monitored=monitored)).decode()

    assert re.findall(r"[\w./:@-]*example\.com[\w./-]*", text) == []
    for value in ("YOUR_REGISTRY/calculation-requests:0.1.0", "api.YOUR_DOMAIN", "issuer.YOUR_DOMAIN"):
        assert value in text
    links = re.findall(r'"runbook_url":"([^"#]+)#\w+"', text)
    assert set(links) == ({"https://YOUR_DOMAIN/deploy/runbook.md"} if monitored else set())
    assert re.findall(r'"release":"(.+?)"', text) == ["YOUR_RELEASE"] * len(
        re.findall('"kind":"(?:PodMonitor|PrometheusRule)"', text)
    )


def test_every_core_kind_of_it_is_valid_in_strict_mode(tmp_path):
    kinds = {"Deployment", "Service", "Ingress", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"}

    assert kinds <= valid_kinds(made(tmp_path, "production"))


@pytest.mark.parametrize("overlay", WITH_ENGINES)
def test_its_namespace_reaches_every_object_and_every_address_of_a_service(overlay, tmp_path):
    objects = made(tmp_path, overlay, {"namespace": "elsewhere"})

    addresses = re.findall(rb"\w+\.([\w-]+)\.svc\b", msgspec.json.encode(objects))

    assert {one["metadata"]["namespace"] for one in objects} == {"elsewhere"}
    assert set(addresses) == {b"elsewhere"}


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_can_be_used_without_the_others(component, tmp_path):
    alone = {"resources": [f"{OURS}/base"], "components": [f"{OURS}/components/{component}"]}

    objects = overlay_outside(tmp_path, {**alone, "namespace": "elsewhere"})

    assert {one["metadata"]["namespace"] for one in objects} == {"elsewhere"}
    assert len([one for one in objects if one["kind"] == "Deployment"]) >= 4


def test_page_says_how_to_give_a_slow_balancer_more_time(tmp_path):
    (patches,) = map(msgspec.yaml.decode, code_blocks(OPERATING, "Shutdown", "yaml"))

    objects = made(tmp_path, "external", patches)

    (api,) = (one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"] == "api")
    more = 30
    assert container_of(api)["lifecycle"]["preStop"]["sleep"]["seconds"] == (
        container_of(workloads("external")["api"])["lifecycle"]["preStop"]["sleep"]["seconds"] + more
    )
    assert pod_of(api)["terminationGracePeriodSeconds"] == grace_seconds() + more


def test_ingress_exposes_only_the_api_of_callers(tmp_path):
    (ingress,) = (one for one in made(tmp_path, "external") if one["kind"] == "Ingress")
    (rule,) = ingress["spec"]["rules"]

    assert {path["path"] for path in rule["http"]["paths"]} == {"/v1", "/schema"}


def test_gateway_may_take_the_place_of_the_ingress(tmp_path):
    ours = {"resources": [f"{OURS}/overlays/external"], "components": [f"{OURS}/components/gateway"]}
    patch = "- {op: replace, path: /spec/hostnames/0, value: api.own.test}\n"
    patch += "- {op: replace, path: /spec/parentRefs/0, value: {name: own, namespace: gateways}}\n"
    patches = [{"target": {"kind": "HTTPRoute", "name": "api"}, "patch": patch}]  # the paths on the page

    objects = overlay_outside(tmp_path, {**ours, "patches": patches})

    specifications = {one["kind"]: one["spec"] for one in objects if "spec" in one}
    route = specifications["HTTPRoute"]
    assert route["hostnames"] == ["api.own.test"]
    assert route["parentRefs"] == [{"name": "own", "namespace": "gateways"}]
    (rule,) = route["rules"]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1", "/schema"]
    assert rule["backendRefs"] == [{"name": "api", "port": specifications["Service"]["ports"][0]["port"]}]
