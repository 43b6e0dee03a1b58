"""Postgres and RabbitMQ, found or started: for `make run` and the tests.

Each is looked up in this order: the URL in the environment, a container if a Docker engine can run one, a
child process. An image that the environment names is used, or it is an error.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Place, Report
from deploy.local.servers.containers import container, postgres_image, rabbitmq_image
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import NoAnswer, NotHere, Server, check_postgres, check_rabbitmq

Way = Callable[[Place], AbstractContextManager[Server]]


@contextmanager
def postgres(folder: Path, *, keep: bool, report: Report) -> Iterator[Server]:
    """Yield a Postgres that answers. *keep*: the next run finds its data."""
    image = postgres_image(keep=keep)
    given = partial(_given, "DATABASE_URL", check_postgres, image.server)
    process = _unless_image_named("TEST_POSTGRES_IMAGE", postgres_process)
    place = Place(folder=folder, keep=keep, report=report)
    with first_available((given, partial(container, image), process), place) as server:
        yield server


@contextmanager
def rabbitmq(folder: Path, *, keep: bool, report: Report) -> Iterator[Server]:
    """Yield a RabbitMQ that answers. *keep*: the next run finds its data."""
    image = rabbitmq_image()
    given = partial(_given, "AMQP_URL", check_rabbitmq, image.server)
    process = _unless_image_named("TEST_RABBITMQ_IMAGE", rabbitmq_node)
    place = Place(folder=folder, keep=keep, report=report)
    with first_available((given, partial(container, image), process), place) as server:
        yield server


def _unless_image_named(variable: str, process: Way) -> Way:
    """Return *process*, or an error if *variable* names an image: the process is of another version."""

    def refuse(_: Place) -> AbstractContextManager[Server]:
        raise LocalStackError(
            f"{variable} is set, but no container of that image can run here. Correct or unset it."
        )

    return refuse if os.environ.get(variable) else process


@contextmanager
def first_available(ways: Sequence[Way], place: Place) -> Iterator[Server]:
    """Yield the server of the first of *ways* that is available, and report why those before are not."""
    *others, last = ways
    with ExitStack() as context:
        for way in others:
            try:
                server = context.enter_context(way(place))
            except NotHere as reason:
                if str(reason):
                    place.report(str(reason))
            else:
                yield server
                return
        yield context.enter_context(last(place))


@contextmanager
def _given(variable: str, check: Callable[[str], None], name: str, _: Place) -> Iterator[Server]:
    """Yield the server at the URL in the environment. A URL that cannot be used is an error."""
    url = os.environ.get(variable)
    if not url:
        raise NotHere
    try:
        check(url)
    except NoAnswer as reason:
        raise LocalStackError(
            f"{variable} is set, but no {name} is usable at {_address(url)} ({reason}). "
            f"Correct it, or unset it to have {name} started here."
        ) from None
    yield Server(url)


def _address(url: str) -> str:
    """Return only host and port of a URL."""
    try:
        host, port = urlsplit(url).hostname, urlsplit(url).port
    except ValueError:
        return "its address"
    return f"{host}:{port}" if port else f"{host}"
