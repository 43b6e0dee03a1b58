"""The image: built, run without privileges on a read-only filesystem, and its API started.

Not part of `make test`, because building takes its time: `make deploy-check` runs it where an engine answers.
"""

import os
import time
from pathlib import Path

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import run_command
from tests.deploy.manifests import grace_seconds
from tests.harness import databases
from tests.harness.processes import Process, environment_of

_IMAGE = "calculation-requests:check"
_PIP_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PYTHON_IMAGE")
_RESTRICTED = (
    *("--network", "host", "--read-only", "--user", "10001:10001"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)


def docker(*arguments: str | Path, seconds: float = 60) -> str:
    return run_command("docker", ["docker", *arguments], folder=CHECKOUT, seconds=seconds)


try:
    docker("info")
except (LocalStackError, FileNotFoundError):
    pytest.skip("no Docker engine answers: the image is not tested", allow_module_level=True)


@pytest.fixture(scope="module")
def image():
    """The image, built from this checkout."""
    given = [part for name in _PIP_SETTINGS for part in ("--build-arg", name)]
    where = ("--file", "deploy/Dockerfile", "--tag", _IMAGE, ".")
    docker("build", "--quiet", "--network", "host", *given, *where, seconds=600)
    return _IMAGE


def test_image_holds_the_program_and_nothing_to_install_or_compile_with_and_its_user_is_not_root(image):
    tools = "for tool in pip pip3 gcc cc make; do command -v $tool; done || true"
    modules = "import importlib.util as u; print([n for n in ('pip', 'ensurepip') if u.find_spec(n)])"

    assert docker("run", "--rm", "--entrypoint", "sh", image, "-c", tools) == ""
    assert docker("run", "--rm", "--entrypoint", "python", image, "-c", modules) == "[]"
    assert "PIP_" not in docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert docker("inspect", "--format", "{{.Config.User}}", image) == "10001:10001"
    files = docker("run", "--rm", "--entrypoint", "ls", image, "-A", "/app")
    assert set(files.split()) == {"schema.sql", "service", "worker"}


async def test_api_runs_in_a_restricted_container_and_stops(image, service_settings, issuer, tmp_path):
    issuer.jwks.chmod(0o644)
    port, probes_port = free_port(), free_port()
    variables = {"HOST": "127.0.0.1", "PORT": str(port), "HEALTH_PORT": str(probes_port)}
    environment = environment_of(service_settings, **variables).items()
    given = [part for one in environment if one[0] not in os.environ for part in ("--env", "=".join(one))]
    given += ["--volume", f"{issuer.jwks}:{issuer.jwks}:ro"]
    owner = ("--env", f"DATABASE_URL={databases.as_role(service_settings.database_url, 'owner')}")
    docker("run", "--rm", *_RESTRICTED, *owner, image, "service", "schema", "apply")
    container = docker("run", "--detach", *_RESTRICTED, *given, image, "service", "serve")
    try:
        process = Process(
            "container", [], environment={}, port=port, probes_port=probes_port, folder=tmp_path
        )
        await process.becomes_ready()
        began_at = time.monotonic()
        docker("stop", "--time", f"{grace_seconds():.0f}", container)
        seconds = time.monotonic() - began_at
        status = docker("inspect", "--format", "{{.State.ExitCode}}", container)
    finally:
        print(docker("logs", "--tail", "40", container))  # noqa: T201 - pytest shows it on failure
        docker("rm", "--force", container)

    assert (status, seconds < grace_seconds()) == ("0", True)
