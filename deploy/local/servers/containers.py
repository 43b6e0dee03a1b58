"""Postgres and RabbitMQ in containers, if a Docker engine answers and has the images or can pull them."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from docker.errors import DockerException, ImageNotFound
from docker.models.containers import Container
from docker.utils import parse_repository_tag
from testcontainers.core.docker_client import DockerClient

from deploy.local.errors import Interrupted
from deploy.local.machine.folders import CHECKOUT, Place, secret_in, working_folder
from deploy.local.machine.ports import free_port
from deploy.local.machine.waiting import is_interrupted, trouble_before
from deploy.local.servers.server import NotHere, Server, trouble_of_postgres, trouble_of_rabbitmq

_FIRST_ANSWER_SECONDS = 3
_ENGINE_SECONDS = 60  # without a byte from the engine, also during a pull
_START_SECONDS = 120.0
_STOP_SECONDS = 20
# docker-py passes the errors of its HTTP client on, which are OSErrors.
_ENGINE_ERRORS = (DockerException, OSError)


def _hash(thing: object) -> str:
    return hashlib.sha256(str(thing).encode()).hexdigest()[:12]


_OF_CHECKOUT = f"calculation-requests-{_hash(CHECKOUT)}"  # the volumes' names start so


@dataclass(frozen=True, kw_only=True)
class Image:
    """How a server's image is configured, and how to check that the server answers."""

    server: str
    name: str
    variable: str  # which may name another image
    port: int
    data: str
    trouble_at: Callable[[str], str | None]  # a URL
    url: Callable[[int, str], str]
    environment: Callable[[str], dict[str, str]]
    client: Sequence[str]
    command: list[str] = field(default_factory=list)


def postgres_image(*, keep: bool) -> Image:
    """Return Postgres's image. Data that is not kept is written without fsync."""
    durability = [] if keep else ["-c", "fsync=off", "-c", "full_page_writes=off"]
    return Image(
        server="Postgres",
        name=os.environ.get("TEST_POSTGRES_IMAGE") or "postgres:18",
        variable="TEST_POSTGRES_IMAGE",
        port=5432,
        # Set explicitly: images of 18 and later have another default.
        data="/var/lib/postgresql/data",
        trouble_at=trouble_of_postgres,
        url=lambda port, password: f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres",
        environment=lambda password: {"POSTGRES_PASSWORD": password, "PGDATA": "/var/lib/postgresql/data"},
        client=["psql", "-U", "postgres"],
        command=["postgres", "-c", "max_connections=200", *durability],
    )


def rabbitmq_image() -> Image:
    """Return RabbitMQ's image."""
    return Image(
        server="RabbitMQ",
        name=os.environ.get("TEST_RABBITMQ_IMAGE") or "rabbitmq:4-management",
        variable="TEST_RABBITMQ_IMAGE",
        port=5672,
        data="/var/lib/rabbitmq",
        trouble_at=trouble_of_rabbitmq,
        url=lambda port, password: f"amqp://guest:{password}@127.0.0.1:{port}/",
        environment=lambda password: {
            "RABBITMQ_DEFAULT_USER": "guest",
            "RABBITMQ_DEFAULT_PASS": password,
            # A node finds its data by its name.
            "RABBITMQ_NODENAME": "rabbit@localhost",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-rabbit max_message_size 131072",
        },
        client=["rabbitmqctl"],
    )


@contextmanager
def container(image: Image, place: Place) -> Iterator[Server]:
    """Run *image* with one port on the loopback interface. Raises NotHere if that is impossible."""
    with _engine() as engine:
        end = partial(_remove_container, engine, place)
        with working_folder(place, f"{image.server.lower()}-container", end=end) as folder:
            try:
                yield _started(engine, image, place, folder)
            finally:
                end(folder)


def remove_volumes() -> None:
    """Remove the volumes of this checkout, if an engine answers."""
    with suppress(NotHere), _engine() as engine:
        for volume in engine.client.volumes.list(filters={"name": _OF_CHECKOUT}):
            volume.remove()


@contextmanager
def _engine() -> Iterator[DockerClient]:
    """Connect to the Docker engine. Raises NotHere without a text if there is none."""
    try:
        engine = DockerClient(timeout=_FIRST_ANSWER_SECONDS)
    except _ENGINE_ERRORS:
        raise NotHere from None
    with closing(engine.client):
        engine.client.api.timeout = _ENGINE_SECONDS
        yield engine


def _started(engine: DockerClient, image: Image, place: Place, folder: Path) -> Server:
    """Return the server in a new container, once it answers. Raises NotHere."""
    port, name = free_port(), _container_name(folder)
    url = image.url(port, secret_in(folder / "password"))
    # A volume for each image: another one may not be able to read this one's data.
    volume = {f"{_OF_CHECKOUT}-{_hash(image.name)}": {"bind": image.data, "mode": "rw"}}
    try:
        _pull_if_missing(engine, image.name, place)
        started = engine.run(
            image.name,
            image.command,
            detach=True,
            environment=image.environment(secret_in(folder / "password")),
            ports={f"{image.port}/tcp": ("127.0.0.1", port)},
            name=name,
            volumes=volume if place.keep else {},
        )
        if trouble := trouble_before(
            lambda: not image.trouble_at(url), lambda: _trouble(started), seconds=_START_SECONDS
        ):
            raise DockerException(f"{trouble} Its last line: {started.logs(tail=1).decode(errors='replace')}")
    except _ENGINE_ERRORS as error:
        raise NotHere(f"No container for {image.server}: {error}") from None
    place.report(f"{image.server} runs in a container of {image.name}, port {port}.")
    return Server(
        url,
        lambda: _trouble(started),
        lambda: started.logs(tail=40).decode(errors="replace"),
        client=("docker", "exec", "-i", name, *image.client),
    )


def _pull_if_missing(engine: DockerClient, image: str, place: Place) -> None:
    with suppress(ImageNotFound):
        engine.client.images.get(image)
        return
    place.report(f"Pulling the image {image} …")
    repository, tag = parse_repository_tag(image)
    for step in engine.client.api.pull(repository, tag=tag or "latest", stream=True, decode=True):
        if is_interrupted():
            raise Interrupted
        if "error" in step:
            raise DockerException(step["error"])


def _trouble(started: Container) -> str | None:
    """Return how the container ended, or None while it runs."""
    name = f"The container of {started.attrs['Config']['Image']}"
    try:
        started.reload()
    except _ENGINE_ERRORS as error:
        return f"{name} cannot be found: {error}"
    return None if started.status == "running" else f"{name} is {started.status}."


def _remove_container(engine: DockerClient, place: Place, folder: Path) -> None:
    """Remove the container, after an orderly shutdown if its data is kept.

    If the engine cannot remove it now, the next run does.
    """
    with suppress(*_ENGINE_ERRORS):
        found = engine.client.containers.get(_container_name(folder))
        if place.keep:
            found.stop(timeout=_STOP_SECONDS)
        found.remove(force=True, v=True)


def _container_name(folder: Path) -> str:
    return f"calculation-requests-{_hash(folder)}"
