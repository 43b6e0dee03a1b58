"""The operators' kinds, checked with the schemas generated from the operators' source and published on npm.

The kinds of RabbitMQ's operators and of the Barman Cloud plugin are not published there.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.processes import run_command
from tests.deploy.manifests import (
    K8S,
    WITH_ENGINES,
    Manifest,
    render,
    rendered,
    rendered_upon_production,
)
from tests.deploy.test_restore import A_RESTORE, A_ROLE

_HERE = Path(__file__).with_name("operator_schemas")
_PUBLISHED = (
    "postgresql.cnpg.io/",
    "keda.sh/",
    "monitoring.coreos.com/",
    "cert-manager.io/",
    "gateway.networking.k8s.io/",
)


@pytest.fixture(scope="module")
def schemas():
    """A folder with the packages, installed by their hashes."""
    npm = shutil.which("npm")
    if not npm:
        pytest.skip("npm is not installed: the operators' published schemas are not checked")
    folder = CHECKOUT / ".local" / "operator-schemas"
    shutil.copytree(_HERE, folder, dirs_exist_ok=True)
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


def published() -> list[Manifest]:
    """Return the manifests that have a published schema."""
    manifests = [one for overlay in WITH_ENGINES for one in rendered(overlay)]
    manifests += render(K8S / "components" / "gateway")
    return [one for one in manifests if one["apiVersion"].startswith(_PUBLISHED)]


def test_published_schemas_refuse_nothing(schemas):
    assert len(published()) >= 35
    assert refusals(schemas, published()) == []


def test_published_schemas_refuse_neither_a_restore_nor_a_role(schemas, tmp_path):
    changed = [
        rendered_upon_production(part, folder=tmp_path / name)["Cluster postgres"]
        for name, part in (("restore", A_RESTORE), ("role", A_ROLE))
    ]

    assert refusals(schemas, changed) == []


def test_published_schemas_would_refuse_a_wrong_type_and_a_misspelt_field(schemas):
    cluster = next(one for one in published() if one["kind"] == "Cluster")
    wrong = [
        cluster | {"spec": cluster["spec"] | change} for change in ({"instances": "three"}, {"instancse": 3})
    ]

    assert refusals(schemas, wrong) == [
        "Cluster postgres: data/spec/instances must be integer",
        "Cluster postgres: unknown fields: /spec/instancse",
    ]
