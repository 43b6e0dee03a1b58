"""Ports found free on this machine."""

import socket

import pytest

from deploy.local.machine.ports import accepts, free_port


def test_free_port_is_not_found_by_another_search_but_a_server_can_listen_on_it():
    port = free_port()

    with socket.socket() as other_search, pytest.raises(OSError, match="in use"):
        other_search.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)):
        assert accepts(port)
    assert not accepts(port)
