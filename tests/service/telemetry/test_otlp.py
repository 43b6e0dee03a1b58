"""The end of a process that exports traces, while the collector does not answer."""

import socket

from service.telemetry import otlp


def test_end_does_not_wait_until_the_export_to_a_silent_collector_gives_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(10)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"

        with (
            otlp.open_tracer(endpoint, service="test") as tracer,
            tracer.span("a span", "client", parent=None, attributes={}),
        ):
            pass

        connection, _ = silent.accept()
    with connection:
        assert not is_closed_by_the_peer(connection), "the export has given up"


def is_closed_by_the_peer(connection: socket.socket) -> bool:
    """Whether all that was sent ends with the end of the connection."""
    connection.settimeout(0)
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return False
    return True
