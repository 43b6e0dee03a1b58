"""TCP ports of the loopback interface."""

import os
import secrets
import socket
from collections import deque

from deploy.local.errors import LocalStackError

# Below the range of ephemeral ports: an outgoing connection cannot take a port after it was found free and
# before the server binds it.
_LOWEST, _HIGHEST = 20_000, 32_000
_TRIES = 1_000
_claims: deque[socket.socket] = deque(maxlen=100)  # of ports that were found free last


def trouble(port: int) -> str | None:
    """Return why no server could listen on this port, or None if one could."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return os.strerror(error.errno or 0)
    return None


def accepts(port: int) -> bool:
    """Return whether something listens on this port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a port that no server listens on, and that is not returned again before one could."""
    for _ in range(_TRIES):
        port = _LOWEST + secrets.randbelow(_HIGHEST - _LOWEST)
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        # Now a server may bind it too, but `free_port` of another process, which does not set this, may not.
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _claims.append(claim)
        return port
    raise LocalStackError(f"No port between {_LOWEST} and {_HIGHEST} is free.")
