"""The manifests of an overlay, as applied to Kubernetes."""

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.packages import PACKAGES
from service.settings import ServiceSettings, Settings
from worker.process import ROLES
from worker.settings import EmailSettings

Manifest: TypeAlias = dict[str, Any]

K8S = CHECKOUT / "deploy" / "k8s"
OURS = "../calculation-requests/deploy/k8s"  # on the pages, from an overlay beside the checkout
WITH_ENGINES = ("production", "small")
OVERLAYS = ("dev", "external", *WITH_ENGINES)
WORKERS = tuple(ROLES)
PROCESSES = ("api", *WORKERS)
OF_RABBITMQ = [name for name in WORKERS if "rabbitmq" in ROLES[name].servers]
OF_BOUNCES = {"BOUNCES_URL", "BOUNCES_TOKEN_URL"}
OF_ALL = {"DATABASE_URL", "LISTEN_DATABASE_URL", "AMQP_URL", "SMTP_URL", "REQUEST_SECRET_KEYS", *OF_BOUNCES}
SETTINGS: dict[str, type[Settings]] = {"api": ServiceSettings}
SETTINGS |= {name: role.settings for name, role in ROLES.items()}
# The secrets of each process, and of operators' Jobs. LISTEN_DATABASE_URL and those of bounces are optional.
SECRETS = {
    process: OF_ALL & {field.encode_name for field in msgspec.structs.fields(settings)}
    for process, settings in (SETTINGS | {"operator": EmailSettings}).items()
}


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    return render(K8S / "overlays" / overlay)


def render(folder: Path) -> tuple[Manifest, ...]:
    """Return every object of a kustomization. Skips the test if kustomize is not installed."""
    kubectl = shutil.which("kubectl", path=f"{os.environ['PATH']}:{PACKAGES}/kubectl/usr/bin")
    kustomize = shutil.which("kustomize")
    if not (kubectl or kustomize):
        pytest.skip("neither kubectl nor kustomize is installed: the manifests cannot be rendered")
    command = [kubectl, "kustomize"] if kubectl else [str(kustomize), "build"]
    ended = subprocess.run([*command, folder], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return tuple(msgspec.yaml.decode(text) for text in ended.stdout.split("\n---\n"))


def rendered_upon_production(*parts: str, folder: Path) -> dict[str, Manifest]:
    """Return the objects of an overlay outside that adds *parts* to production, by kind and name."""
    production = {"resources": [f"{OURS}/overlays/production"]}
    objects = overlay_outside(folder, production, *map(msgspec.yaml.decode, parts))
    return {f"{one['kind']} {one['metadata']['name']}": one for one in objects}


def of_kind(overlay: str, *kinds: str) -> dict[str, Manifest]:
    return {found["metadata"]["name"]: found for found in rendered(overlay) if found["kind"] in kinds}


def overlay_outside(folder: Path, *parts: Manifest) -> tuple[Manifest, ...]:
    """Return every object of an overlay in *folder*. Its lists are those of all *parts*."""
    return render(written_outside(folder, *parts))


def written_outside(folder: Path, *parts: Manifest) -> Path:
    """Write an overlay into *folder*, made if it is missing, and return it."""
    folder.mkdir(exist_ok=True)
    ours = os.path.relpath(K8S, folder.resolve())
    merged: Manifest = {}
    for part in parts:
        for key, value in part.items():
            merged[key] = [*merged.get(key, []), *value] if isinstance(value, list) else value
    (folder / "kustomization.yaml").write_text(msgspec.yaml.encode(merged).decode().replace(OURS, ours))
    return folder


def the_one(overlay: str, kind: str, name: str) -> Manifest:
    """Return the object of that kind and name, without the hash that kustomize may append."""
    objects = of_kind(overlay, kind)
    return objects.get(name) or next(one for full, one in objects.items() if full.rpartition("-")[0] == name)


def pod_of(workload: Manifest) -> Manifest:
    """Return the pod's specification of a Deployment, StatefulSet or CronJob."""
    specification: Manifest = workload["spec"]
    job = specification.get("jobTemplate", {"spec": specification})
    return job["spec"]["template"]["spec"]


def container_of(workload: Manifest) -> Manifest:
    (container,) = pod_of(workload)["containers"]
    return container


def schema_container_of(overlay: str) -> Manifest:
    """Return the init container that applies the schema before an API starts."""
    first = pod_of(workloads(overlay)["api"])["initContainers"]
    return next(each for each in first if each["name"] == "schema")


def workloads(overlay: str) -> dict[str, Manifest]:
    """Return every workload by name, except those that Kubernetes' operators create."""
    return of_kind(overlay, "Deployment", "StatefulSet", "CronJob")


def replicas(overlay: str) -> dict[str, tuple[int, int]]:
    """Return how many pods of each process there are at least and at most."""
    fixed = {name: workloads(overlay)[name]["spec"].get("replicas") for name in PROCESSES}
    counts = {name: (count, count) for name, count in fixed.items()}
    for scaler, least, most in (
        ("HorizontalPodAutoscaler", "minReplicas", "maxReplicas"),
        ("ScaledObject", "minReplicaCount", "maxReplicaCount"),
    ):
        scaled = of_kind(overlay, scaler).items()
        counts |= {name: (one["spec"][least], one["spec"][most]) for name, one in scaled}
    return counts


def grace_seconds() -> float:
    """Return the grace period of the service's pods. Needs no kustomize."""
    patch = msgspec.yaml.decode((K8S / "base" / "patches" / "every-deployment.yaml").read_bytes())
    return float(pod_of(patch)["terminationGracePeriodSeconds"])


def configuration(overlay: str) -> dict[str, str]:
    return the_one(overlay, "ConfigMap", "configuration")["data"]


def environment_of(overlay: str, process: str) -> dict[str, str | None]:
    """Return the environment of a process; None for values that come from a Secret."""
    container = container_of(workloads(overlay)[process])
    return configuration(overlay) | {entry["name"]: entry.get("value") for entry in container["env"]}
