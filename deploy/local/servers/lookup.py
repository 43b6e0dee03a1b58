"""Postgres and RabbitMQ, found or started: for `make run`, `make demo` and the tests.

Each is looked up in this order: the URL in the environment, a container if a Docker engine can run one, a
child process. An image that the environment names is used, or it is an error.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Place, Report
from deploy.local.machine.waiting import Stopping, never
from deploy.local.servers.containers import container, postgres_image, rabbitmq_image
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import NoAnswer, NotHere, Server, check_postgres, check_rabbitmq

Way = Callable[[Place], AbstractContextManager[Server]]


@dataclass(frozen=True)
class Servers:
    """Postgres and RabbitMQ, both answering."""

    postgres: Server
    rabbitmq: Server


@contextmanager
def postgres(folder: Path, *, keep: bool, report: Report, stopping: Stopping = never) -> Iterator[Server]:
    """Yield a Postgres that answers. *keep*: the next run finds its data."""
    with _postgres(Place(folder=folder, keep=keep, report=report, stopping=stopping)) as server:
        yield server


@contextmanager
def rabbitmq(folder: Path, *, keep: bool, report: Report, stopping: Stopping = never) -> Iterator[Server]:
    """Yield a RabbitMQ that answers. *keep*: the next run finds its data."""
    with _rabbitmq(Place(folder=folder, keep=keep, report=report, stopping=stopping)) as server:
        yield server


@contextmanager
def both(folder: Path, *, keep: bool, report: Report, stopping: Stopping = never) -> Iterator[Servers]:
    """Yield Postgres and RabbitMQ, started and stopped concurrently."""
    given_up = False

    def stopping_now() -> bool:
        return given_up or stopping()

    place = Place(folder=folder, keep=keep, report=report, stopping=stopping_now)
    contexts = (ExitStack(), ExitStack())
    with ThreadPoolExecutor(2) as threads:
        starts = [
            threads.submit(context.enter_context, server)
            for context, server in zip(contexts, (_postgres(place), _rabbitmq(place)), strict=True)
        ]
        try:
            yield Servers(*(start.result() for start in starts))
        finally:
            # If one cannot start, or the caller has failed, the start of the other is given up.
            given_up = True
            wait(starts)
            for closed in [threads.submit(context.close) for context in contexts]:
                closed.result()


def _postgres(place: Place) -> AbstractContextManager[Server]:
    image = postgres_image(keep=place.keep)
    given = partial(_given, "DATABASE_URL", check_postgres, image.server)
    process = _unless_image_named("TEST_POSTGRES_IMAGE", postgres_process)
    return first_available((given, partial(container, image), process), place)


def _rabbitmq(place: Place) -> AbstractContextManager[Server]:
    image = rabbitmq_image()
    given = partial(_given, "AMQP_URL", check_rabbitmq, image.server)
    process = _unless_image_named("TEST_RABBITMQ_IMAGE", rabbitmq_node)
    return first_available((given, partial(container, image), process), place)


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
    with ExitStack() as context:
        yield _enter_first(ways, context, place)


def _enter_first(ways: Sequence[Way], context: ExitStack, place: Place) -> Server:
    *others, last = ways
    for way in others:
        try:
            return context.enter_context(way(place))
        except NotHere as reason:
            if str(reason):
                place.report(str(reason))
    return context.enter_context(last(place))


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
