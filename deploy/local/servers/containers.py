"""Postgres and RabbitMQ in containers, if a Docker engine answers and has the images or can pull them."""

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from docker.errors import DockerException, ImageNotFound, NotFound
from docker.utils import parse_repository_tag
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.docker_client import DockerClient, get_docker_host
from testcontainers.core.exceptions import ContainerStartException

from deploy.local.errors import Interrupted
from deploy.local.machine.folders import CHECKOUT, Place, password_of, working_folder
from deploy.local.machine.ports import remembered_port
from deploy.local.machine.waiting import is_interrupted, wait_until
from deploy.local.servers.server import NotHere, Server, answers, check_postgres, check_rabbitmq

_DEFAULT_ENGINE = "unix:///var/run/docker.sock"
_FIRST_ANSWER_SECONDS = 3
_ENGINE_SECONDS = 60  # without a byte from the engine, also during a pull
_START_SECONDS = 120.0
_STOP_SECONDS = 20
_CHECKOUT_LABEL = "calculation-requests.checkout"
# docker-py passes the errors of its HTTP client on, which are OSErrors.
_ENGINE_ERRORS = (DockerException, OSError)


@dataclass(frozen=True, kw_only=True)
class Image:
    """How a server's image is configured, and how to check that the server answers."""

    server: str
    name: str
    port: int
    data: str
    check: Callable[[str], None]
    url: Callable[[int, str], str]
    environment: Callable[[str], Mapping[str, str]]
    client: Sequence[str]
    hostname: str | None = None
    command: list[str] = field(default_factory=list)


def postgres_image(*, keep: bool) -> Image:
    """Return the image in TEST_POSTGRES_IMAGE. Data that is not kept is written without fsync."""
    durability = [] if keep else ["-c", "fsync=off", "-c", "full_page_writes=off"]
    return Image(
        server="Postgres",
        name=os.environ.get("TEST_POSTGRES_IMAGE") or "postgres:18",
        port=5432,
        # Set explicitly: images of 18 and later have another default.
        data="/var/lib/postgresql/data",
        check=check_postgres,
        url=lambda port, password: f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres",
        environment=lambda password: {"POSTGRES_PASSWORD": password, "PGDATA": "/var/lib/postgresql/data"},
        client=["psql", "-U", "postgres"],
        command=["postgres", "-c", "max_connections=200", *durability],
    )


def rabbitmq_image() -> Image:
    """Return the image in TEST_RABBITMQ_IMAGE."""
    return Image(
        server="RabbitMQ",
        name=os.environ.get("TEST_RABBITMQ_IMAGE") or "rabbitmq:4-management",
        port=5672,
        data="/var/lib/rabbitmq",
        check=check_rabbitmq,
        url=lambda port, password: f"amqp://guest:{password}@127.0.0.1:{port}/",
        environment=lambda password: {
            "RABBITMQ_DEFAULT_USER": "guest",
            "RABBITMQ_DEFAULT_PASS": password,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-rabbit max_message_size 131072",
        },
        client=["rabbitmqctl"],
        # A node finds its data by its name, which contains the host's.
        hostname="calculation-requests",
    )


@contextmanager
def container(image: Image, place: Place) -> Iterator[Server]:
    """Run *image* with one port on the loopback interface. Raises NotHere if that is impossible."""
    with _engine() as engine:
        _have_image(engine, image, place)
        name = f"{image.server.lower()}-container"
        with working_folder(place, name, end=lambda folder: _remove_container(engine, folder)) as folder:
            port = remembered_port(folder / "port")
            prepared = _prepare(engine, image, folder, port, place)
            try:
                url = image.url(port, password_of(folder))
                _start(prepared, image, url)
                place.report(f"{image.server} runs in a container of {image.name}, port {port}.")
                client = ("docker", "exec", "-i", _container_name(folder), *image.client)
                yield Server(
                    url,
                    lambda: _trouble(prepared, image),
                    lambda: _last_lines(prepared, 40),
                    client=client,
                )
            finally:
                _stop(prepared, place)


def remove_volumes() -> None:
    """Remove the volumes of this checkout, if an engine answers."""
    with suppress(NotHere), _engine() as engine:
        for volume in engine.volumes.list(filters={"label": f"{_CHECKOUT_LABEL}={_hash(CHECKOUT)}"}):
            volume.remove()


@contextmanager
def _engine() -> Iterator[Any]:
    """Connect to the Docker engine. Raises NotHere without a text if there is none."""
    # No reaper: it is one more image to pull, and the next run removes what this one leaves behind.
    testcontainers_config.ryuk_disabled = True
    if not _may_answer(get_docker_host() or _DEFAULT_ENGINE):
        raise NotHere
    try:
        client = DockerClient(timeout=_FIRST_ANSWER_SECONDS).client
    except _ENGINE_ERRORS:
        raise NotHere from None
    with closing(client):
        client.api.timeout = _ENGINE_SECONDS
        yield client


def _may_answer(engine: str) -> bool:
    """Return whether an engine may listen there: docker-py leaks a socket if nothing does."""
    address = urlsplit(engine)
    if address.scheme != "unix":
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_FIRST_ANSWER_SECONDS)
        return probe.connect_ex(address.path) == 0


def _have_image(engine: Any, image: Image, place: Place) -> None:  # noqa: ANN401 - docker-py has no types
    """Pull the image if it is missing. Raises NotHere if that fails."""
    name = testcontainers_config.hub_image_name_prefix + image.name
    try:
        engine.images.get(name)
    except ImageNotFound:
        place.report(f"Pulling the image {name} …")
        _pull(engine, image, name)
    except _ENGINE_ERRORS as error:
        raise _not_here(image, _first_line(error)) from None


def _pull(engine: Any, image: Image, name: str) -> None:  # noqa: ANN401
    repository, tag = parse_repository_tag(name)
    try:
        for step in engine.api.pull(repository, tag=tag or "latest", stream=True, decode=True):
            if is_interrupted():
                raise Interrupted
            if "error" in step:
                raise DockerException(step["error"])
    except _ENGINE_ERRORS as error:
        raise _not_here(image, f"{name} cannot be pulled ({_first_line(error)})") from None


def _prepare(engine: Any, image: Image, folder: Path, port: int, place: Place) -> DockerContainer:  # noqa: ANN401
    """Return the container, not started. Its name and volume are derived from its folder."""
    labels = {_CHECKOUT_LABEL: _hash(CHECKOUT)}
    prepared = DockerContainer(
        image.name,
        docker_client_kw={"timeout": _ENGINE_SECONDS},
        name=_container_name(folder),
        labels=labels,
        hostname=image.hostname,
    )
    prepared.with_envs(**image.environment(password_of(folder)))
    if image.command:
        prepared.with_command(image.command)
    # docker-py accepts a pair of address and port, which testcontainers' types do not allow.
    ports = cast("dict[str, Any]", prepared.ports)
    ports[f"{image.port}/tcp"] = ("127.0.0.1", port)
    if place.keep:
        # A volume for each image: another one may not be able to read this one's data.
        volume = f"{_container_name(folder)}-{_hash(image.name)}"
        engine.volumes.create(volume, labels=labels)
        prepared.with_volume_mapping(volume, image.data, "rw")
    return prepared


def _start(prepared: DockerContainer, image: Image, url: str) -> None:
    """Start the container and wait until the server in it answers. Raises NotHere."""

    def answered_or_died() -> bool:
        return answers(image.check, url) or _trouble(prepared, image) is not None

    try:
        prepared.start()
        in_time = wait_until(answered_or_died, seconds=_START_SECONDS, pause_seconds=0.1)
        trouble = _trouble(prepared, image) or (None if in_time else "It does not answer.")
        if trouble:
            raise _not_here(image, f"{trouble} Its last line: {_last_lines(prepared, 1) or 'nothing'}")
    except _ENGINE_ERRORS as error:
        raise _not_here(image, _first_line(error)) from None


def _trouble(started: DockerContainer, image: Image) -> str | None:
    """Return how the container ended, or None while it runs."""
    try:
        started.reload()
    except NotFound:
        return f"The {image.server} container was removed."
    except _ENGINE_ERRORS as error:
        return f"The Docker engine does not answer: {_first_line(error)}"
    return None if started.status == "running" else f"The {image.server} container is {started.status}."


def _stop(started: DockerContainer, place: Place) -> None:
    """Remove the container, after an orderly shutdown if its data is kept.

    If the engine cannot remove it now, the next run does.
    """
    with suppress(*_ENGINE_ERRORS, ContainerStartException):
        if place.keep:
            started.get_wrapped_container().stop(timeout=_STOP_SECONDS)
        started.stop()


def _remove_container(engine: Any, folder: Path) -> None:  # noqa: ANN401
    """Remove the container that a dead run left behind."""
    with suppress(NotFound):
        engine.containers.get(_container_name(folder)).remove(force=True, v=True)


def _not_here(image: Image, reason: str) -> NotHere:
    return NotHere(f"No container for {image.server}: {reason}")


def _last_lines(started: DockerContainer, count: int) -> str:
    output, errors = started.get_logs()
    return "\n".join((output + errors).decode(errors="replace").strip().splitlines()[-count:])


def _container_name(folder: Path) -> str:
    return f"calculation-requests-{_hash(folder)}"


def _hash(thing: object) -> str:
    return hashlib.sha256(str(thing).encode()).hexdigest()[:12]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
