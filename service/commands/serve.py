"""`serve`: the API."""

import click
import uvloop

from service.api.outer_layer import OuterLayer
from service.app import create_app
from service.server import http_server
from service.server.http_server import (
    Address,
    ServerFailed,
    find_address,
    spare_loaded_objects,
    stop_on_signals,
)
from service.settings import ServiceSettings, load
from service.telemetry import logs, tracing

_DRAIN_SHARE = 0.2  # of SHUTDOWN_SECONDS, in which connections are closed after their next response


@click.command()
def serve() -> None:
    """Serve the API until SIGTERM, then finish the requests in flight."""
    settings = load(ServiceSettings)
    logs.configure(settings)
    address = find_address(settings.host, settings.port)
    with tracing.exporting(settings, service="calculation-requests-api"):
        spare_loaded_objects()
        try:
            uvloop.run(_serve(settings, address))
        except ServerFailed as error:
            raise click.ClickException(str(error.__doc__)) from error


async def _serve(settings: ServiceSettings, address: Address) -> None:
    await http_server.serve(
        OuterLayer(create_app(settings)),
        address,
        stop_on_signals(),
        shutdown_seconds=settings.shutdown_seconds,
        drain_seconds=settings.shutdown_seconds * _DRAIN_SHARE,
        keep_alive_seconds=settings.keep_alive_seconds,
    )
