"""An overlay outside the checkout, made from the example, sets everything, without an edit of ours."""

import re

import msgspec
import pytest

from tests.deploy import manifests
from tests.deploy.manifests import K8S, OURS, WITH_ENGINES, container_of, overlay_outside, pod_of, workloads
from tests.deploy.pages import OPERATING, code_blocks

EXAMPLE = msgspec.yaml.decode((K8S / "example.yaml").read_bytes())
MONITORING = f"{OURS}/components/monitoring"


@pytest.mark.parametrize(
    ("overlay", "monitored"),
    [("external", False), ("external", True), *((each, True) for each in WITH_ENGINES)],
)
def test_it_replaces_everything_that_is_made_up_in_ours(overlay, monitored, tmp_path):
    # Edited as its comments say.
    without = overlay in WITH_ENGINES or not monitored
    components = [one for one in EXAMPLE["components"] if one != MONITORING or not without]
    edited = {**EXAMPLE, "resources": [f"{OURS}/overlays/{overlay}"], "components": components}
    if not monitored:
        del edited["transformers"]
    (patches,) = map(msgspec.yaml.decode, code_blocks(OPERATING, "Shutdown", "yaml"))

    objects = overlay_outside(tmp_path, edited, {"namespace": "elsewhere"}, patches)

    text = msgspec.json.encode(objects).decode()
    assert re.findall(r"[\w./:@-]*example\.com[\w./-]*", text) == []
    values = ("YOUR_REGISTRY/calculation-requests:0.1.0", "api.YOUR_DOMAIN", "issuer.YOUR_DOMAIN")
    assert all(value in text for value in values)
    links = re.findall(r'"runbook_url":"([^"#]+)#\w+"', text)
    assert set(links) == ({"https://YOUR_DOMAIN/deploy/runbook.md"} if monitored else set())
    monitors = len(re.findall('"kind":"(?:PodMonitor|PrometheusRule)"', text))
    assert re.findall(r'"release":"(.+?)"', text) == ["YOUR_RELEASE"] * monitors
    assert {one["metadata"]["namespace"] for one in objects} == {"elsewhere"}
    assert {*re.findall(r"\w+\.([\w-]+)\.svc\b", text)} <= {"elsewhere"}
    (rule,) = next(one["spec"]["rules"] for one in objects if one["kind"] == "Ingress")
    assert {path["path"] for path in rule["http"]["paths"]} == {"/v1", "/schema"}
    (api,) = (one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"] == "api")
    seconds, usual = (
        container_of(one)["lifecycle"]["preStop"]["sleep"]["seconds"]
        for one in (api, workloads(overlay)["api"])
    )
    more = (seconds - usual, pod_of(api)["terminationGracePeriodSeconds"] - manifests.grace_seconds())
    assert more == (30, 30), "deploy/operate.md, Shutdown"


def test_each_component_can_be_used_without_the_others(tmp_path):
    components = {folder.parent.name for folder in K8S.glob("components/*/kustomization.yaml")}
    for name in components:  # Rendered together, because each rendering takes half a second.
        alone = {"resources": [f"{OURS}/base"], "components": [f"{OURS}/components/{name}"]}
        manifests.written_outside(tmp_path / name, {**alone, "namespace": name})

    objects = overlay_outside(tmp_path, {"resources": sorted(components)})

    deployments = [one["metadata"]["namespace"] for one in objects if one["kind"] == "Deployment"]
    assert {one["metadata"]["namespace"] for one in objects} == components
    assert all(deployments.count(component) >= 4 for component in components)


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
