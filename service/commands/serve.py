"""`serve`: the API, and its probes on a port of their own, where callers cannot take their places."""

import click
import uvloop

from service.addresses import EventLoop
from service.api.outer_layer import OuterLayer
from service.app import create_app
from service.server import http_server, probes
from service.server.http_server import Address, find_address
from service.settings import ServiceSettings, load
from service.telemetry import logs, tracing

_DRAIN_SHARE = 0.2  # of SHUTDOWN_SECONDS, in which connections are closed after their next response


@click.command()
def serve() -> None:
    """Serve the API until SIGTERM, then finish the requests in flight."""
    settings = load(ServiceSettings)
    logs.configure(settings)
    address = find_address(settings.host, settings.port)
    probes_address = find_address(settings.host, settings.health_port)
    with tracing.exporting(settings, service="calculation-requests-api"):
        http_server.spare_loaded_objects()
        uvloop.run(_serve(settings, address, probes_address), loop_factory=EventLoop)


async def _serve(settings: ServiceSettings, address: Address, probes_address: Address) -> None:
    app, stop = create_app(settings), http_server.stop_on_signals()
    async with probes.serving(app.state.checks, probes_address, stop):
        await http_server.serve(
            OuterLayer(app),
            address,
            stop,
            shutdown_seconds=settings.shutdown_seconds,
            drain_seconds=settings.shutdown_seconds * _DRAIN_SHARE,
            keep_alive_seconds=settings.keep_alive_seconds,
        )
