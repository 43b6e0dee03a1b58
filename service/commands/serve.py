"""`serve`: the API."""

import socket

import click
import uvloop

from service.api.outer_layer import OuterLayer
from service.app import create_app
from service.server import http_server
from service.server.http_server import listen, spare_loaded_objects, stop_on_signals
from service.settings import ServiceSettings, load
from service.telemetry import logs, tracing


@click.command()
def serve() -> None:
    """Serve the API until SIGTERM, then finish the requests in flight."""
    settings = load(ServiceSettings)
    logs.configure(settings)
    with (
        tracing.exporting(settings, service="calculation-requests-api"),
        listen(settings.host, settings.port) as listening,
    ):
        spare_loaded_objects()
        uvloop.run(_serve(settings, listening))


async def _serve(settings: ServiceSettings, listening: socket.socket) -> None:
    await http_server.serve(
        OuterLayer(create_app(settings)),
        listening,
        stop_on_signals(),
        shutdown_seconds=settings.shutdown_seconds,
        keep_alive_seconds=settings.keep_alive_seconds,
    )
