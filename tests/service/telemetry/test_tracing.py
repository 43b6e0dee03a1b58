"""The end of a process that exports traces, while the collector does not answer."""

import socket
from functools import partial

import pytest
from msgspec.structs import replace

from service.telemetry import tracing


def test_end_does_not_wait_until_the_export_to_a_silent_collector_gives_up(service_settings):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(10)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = replace(service_settings, otel_exporter_otlp_endpoint=endpoint)

        with tracing.exporting(settings, service="test"), tracing.span("a span", "client", dict):
            pass

        connection, _ = silent.accept()
        connection.settimeout(0)
        with connection, pytest.raises(BlockingIOError):  # The export has not given up.
            list(iter(partial(connection.recv, 65_536), b""))
