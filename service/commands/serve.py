"""`serve`: the API."""

import click
import uvloop

from service.addresses import EventLoop
from service.api.outer_layer import OuterLayer
from service.app import create_app
from service.server import http_server
from service.settings import ServiceSettings, load
from service.telemetry import logs, tracing

_DRAIN_SHARE = 0.2  # of SHUTDOWN_SECONDS, in which connections are closed after their next response


@click.command()
def serve() -> None:
    """Serve the API until SIGTERM, then finish the requests in flight."""
    settings = load(ServiceSettings)
    logs.configure(settings)
    address = http_server.find_address(settings.host, settings.port)
    with tracing.exporting(settings, service="calculation-requests-api"):
        http_server.spare_loaded_objects()
        uvloop.run(_serve(settings, address), loop_factory=EventLoop)


async def _serve(settings: ServiceSettings, address: http_server.Address) -> None:
    await http_server.serve(
        OuterLayer(create_app(settings)),
        address,
        http_server.stop_on_signals(),
        shutdown_seconds=settings.shutdown_seconds,
        drain_seconds=settings.shutdown_seconds * _DRAIN_SHARE,
        keep_alive_seconds=settings.keep_alive_seconds,
    )
