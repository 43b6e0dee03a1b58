"""A handler that does nothing, served as the API is: the limit of the questionnaire."""

import os

import uvloop
from litestar import Litestar, get

from service.server import http_server
from service.server.http_server import listen, spare_loaded_objects, stop_on_signals
from tests.benchmarks.subjects import QUESTIONNAIRE

_SHUTDOWN_SECONDS = 5.0


@get(["/readyz", QUESTIONNAIRE])
async def nothing() -> None:
    """Answer with an empty body."""


async def main() -> None:
    """Serve on $PORT until SIGTERM."""
    app = Litestar([nothing], openapi_config=None, logging_config=None)
    with listen("127.0.0.1", int(os.environ["PORT"])) as listening:
        spare_loaded_objects()
        await http_server.serve(app, listening, stop_on_signals(), shutdown_seconds=_SHUTDOWN_SECONDS)


if __name__ == "__main__":
    uvloop.run(main())
