"""The image: built, run without privileges on a read-only filesystem, and tried with one request.

Not part of `make test`, because building takes its time: `make deploy-check` runs it where an engine answers.
"""

import os
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import run_command
from service.settings import Settings
from tests.deploy.mail_catching import mail_catcher
from tests.deploy.manifests import grace_seconds
from tests.end_to_end.events import publish_calculation
from tests.harness import databases
from tests.harness.examples import A_REQUEST
from tests.harness.processes import Process, environment_of
from tests.harness.waiting import eventually

_IMAGE = "calculation-requests:check"
_PIP_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PYTHON_IMAGE")
_BUILD_SECONDS = 600
_RESTRICTED = (
    *("--network", "host", "--read-only", "--user", "10001:10001"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)


def docker(*arguments: str | Path, seconds: float = 60) -> str:
    """Run the Docker client, and return its output."""
    command = ["docker", *arguments]
    return run_command("docker", command, folder=CHECKOUT, seconds=seconds)


try:
    docker("info")
except (LocalStackError, FileNotFoundError):
    pytest.skip("no Docker engine answers: the image is not tested", allow_module_level=True)


@pytest.fixture(scope="module")
def image():
    """The image, built from this checkout."""
    given = [part for name in _PIP_SETTINGS for part in ("--build-arg", name)]
    where = ("--file", "deploy/Dockerfile", "--tag", _IMAGE, ".")
    docker("build", "--quiet", "--network", "host", *given, *where, seconds=_BUILD_SECONDS)
    return _IMAGE


def test_image_holds_the_program_and_nothing_to_install_or_compile_with_and_its_user_is_not_root(image):
    tools = "for tool in pip pip3 gcc cc make; do command -v $tool; done"
    modules = "import importlib.util as u; print([n for n in ('pip', 'ensurepip') if u.find_spec(n)])"

    assert docker("run", "--rm", "--entrypoint", "sh", image, "-c", f"{tools} || true") == ""
    assert docker("run", "--rm", "--entrypoint", "python", image, "-c", modules) == "[]"
    assert "PIP_" not in docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert docker("inspect", "--format", "{{.Config.User}}", image) == "10001:10001"
    files = docker("run", "--rm", "--entrypoint", "ls", image, "-A", "/app")
    assert set(files.split()) == {"schema.sql", "service", "worker"}


async def test_one_request_goes_through_the_whole_chain_in_restricted_containers(
    *, image, service_settings, worker_settings, channel, issuer, tmp_path
):
    issuer.jwks.chmod(0o644)
    ports = {"PORT": str(free_port()), "HEALTH_PORT": str(free_port())}
    with ExitStack() as stack:
        smtp_port = stack.enter_context(mail_catcher(tmp_path / "mail"))
        api = of_container(service_settings, **ports)
        worker = of_container(worker_settings, **ports, SMTP_URL=f"smtp://127.0.0.1:{smtp_port}")
        database = ("--env", f"DATABASE_URL={databases.as_role(service_settings.database_url, 'owner')}")
        docker("run", "--rm", *_RESTRICTED, *database, image, "service", "schema", "apply")
        containers = []
        for command, environment in ((("service", "serve"), api), (("worker",), worker)):
            given = [part for variable in environment.items() for part in ("--env", "=".join(variable))]
            volume = ("--volume", f"{issuer.jwks}:{issuer.jwks}:ro")
            containers += [docker("run", "--detach", *_RESTRICTED, *given, *volume, image, *command)]
            stack.callback(remove, containers[-1])
        for port in ports.values():
            await Process("container", [], environment={}, port=int(port), folder=tmp_path).becomes_ready()

        address, headers = f"http://127.0.0.1:{ports['PORT']}", {"Authorization": f"Bearer {issuer.token()}"}
        async with httpx.AsyncClient(base_url=address, headers=headers) as caller:
            uuid = (await caller.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
            await eventually(lambda: any(uuid in mail.read_text() for mail in (tmp_path / "mail").iterdir()))
            await publish_calculation(channel, uuid, "calc-1")
            await eventually(lambda: has_its_calculation(caller, uuid))
        began_at = time.monotonic()
        docker("stop", "--time", f"{grace_seconds():.0f}", *containers)
        seconds = time.monotonic() - began_at
        statuses = docker("inspect", "--format", "{{.State.ExitCode}}", *containers).split()

    assert statuses == ["0", "0"]
    assert seconds < grace_seconds()


async def has_its_calculation(caller: httpx.AsyncClient, uuid: str) -> bool:
    """Whether the API shows the calculation."""
    return bool((await caller.get(f"/v1/request/{uuid}")).json()["data"]["calculation_id"])


def remove(container: str) -> None:
    """Remove a container, and print the end of its log, which pytest shows on failure."""
    print(docker("logs", "--tail", "40", container))  # noqa: T201
    docker("rm", "--force", container)


def of_container(settings: Settings, **variables: str) -> dict[str, str]:
    """Return the environment of a container, which shares only the network of this machine."""
    environment = environment_of(settings, HOST="127.0.0.1", **variables)
    return {name: value for name, value in environment.items() if name not in os.environ}
