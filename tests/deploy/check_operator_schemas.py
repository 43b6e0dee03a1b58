"""The manifests, checked with Kubernetes' schemas, and with those that the operators publish on npm.

The kinds of RabbitMQ's operators and of the Barman Cloud plugin are not published there.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import kubernetes_validate
import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.processes import run_command
from tests.deploy.manifests import K8S, OVERLAYS, Manifest, render, rendered, rendered_upon_production
from tests.deploy.test_postgres import A_RESTORE, A_ROLE

_OF_KUBERNETES = re.compile(r"[^.]+$|(rbac[.]authorization|networking)[.]k8s[.]io/")
_PUBLISHED = re.compile(
    r"(postgresql[.]cnpg[.]io|keda[.]sh|monitoring[.]coreos[.]com|cert-manager[.]io|gateway[.]networking[.]k8s[.]io)/"
)


def of_versions(versions: re.Pattern[str]) -> list[Manifest]:
    """Return the manifests whose `apiVersion` matches: of every overlay, the gateway and the ingress."""
    every = [one for overlay in OVERLAYS for one in rendered(overlay)]
    every += [one for name in ("gateway", "ingress") for one in render(K8S / "components" / name)]
    return [one for one in every if versions.match(one["apiVersion"])]


def test_core_kinds_are_valid_in_strict_mode():
    found = of_versions(_OF_KUBERNETES)
    for one in found:
        kubernetes_validate.validate(one, "1.33", strict=True)

    kinds = {"Deployment", "Service", "Ingress", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"}
    assert kinds <= {one["kind"] for one in found}


@pytest.fixture(scope="module")
def schemas():
    """A folder with the packages, installed by their hashes."""
    npm = shutil.which("npm")
    if not npm:
        pytest.skip("npm is not installed: the operators' published schemas are not checked")
    folder = CHECKOUT / ".local" / "operator-schemas"
    shutil.copytree(Path(__file__).with_name("operator_schemas"), folder, dirs_exist_ok=True)
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
    try:
        run_command("npm ci", [npm, "ci", *options], folder=folder, seconds=300)
    except LocalStackError as reason:
        pytest.skip(f"npm cannot install the operators' published schemas here: {reason}")
    return folder


def refusals(schemas: Path, manifests: Sequence[Manifest]) -> list[str]:
    """Return one line for each manifest that is invalid by its schema."""
    command, sent = ["node", "validate.mjs"], json.dumps(manifests)
    ended = subprocess.run(command, cwd=schemas, input=sent, stdout=subprocess.PIPE, text=True, check=True)
    return ended.stdout.splitlines()


def test_published_schemas_refuse_neither_the_manifests_nor_a_restore_nor_a_role(schemas, tmp_path):
    published = of_versions(_PUBLISHED)
    changed = [
        rendered_upon_production(part, folder=tmp_path / name)["Cluster postgres"]
        for name, part in (("restore", A_RESTORE), ("role", A_ROLE))
    ]

    assert len(published) >= 35
    assert refusals(schemas, [*published, *changed]) == []
    cluster = next(one for one in published if one["kind"] == "Cluster")
    wrong = [cluster | {"spec": cluster["spec"] | one} for one in ({"instances": "three"}, {"instancse": 3})]
    assert refusals(schemas, wrong) == [
        "Cluster postgres: data/spec/instances must be integer",
        "Cluster postgres: unknown fields: /spec/instancse",
    ]
