"""Postgres and RabbitMQ, found or started: for `make run` and the tests.

Each is looked up in this order: the URL in the environment, a container if a Docker engine can run one, a
child process. An image that the environment names is used, or it is an error.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Place
from deploy.local.servers.containers import Image, container, postgres_image, rabbitmq_image
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import NotHere, Server


def postgres(place: Place) -> AbstractContextManager[Server]:
    """Yield a Postgres that answers."""
    return _first_available("DATABASE_URL", postgres_image(keep=place.keep), postgres_process, place)


def rabbitmq(place: Place) -> AbstractContextManager[Server]:
    """Yield a RabbitMQ that answers."""
    return _first_available("AMQP_URL", rabbitmq_image(), rabbitmq_node, place)


@contextmanager
def _first_available(
    variable: str, image: Image, process: Callable[[Place], AbstractContextManager[Server]], place: Place
) -> Iterator[Server]:
    """Yield the server. Report why there is no container, if an engine answers. Raises LocalStackError."""
    if url := os.environ.get(variable):
        if trouble := image.trouble_at(url):
            raise LocalStackError(
                f"{variable} is set, but {image.server} cannot be used there ({trouble}). "
                f"Correct it, or unset it to have {image.server} started here."
            )
        yield Server(url)
        return
    with ExitStack() as context:
        try:
            server = context.enter_context(container(image, place))
        except NotHere as reason:
            if str(reason):
                place.report(str(reason))
            if os.environ.get(image.variable):  # The process may be of another version.
                raise LocalStackError(
                    f"{image.variable} is set, but no container of that image can run here. "
                    "Correct or unset it."
                ) from None
            server = context.enter_context(process(place))
        yield server
