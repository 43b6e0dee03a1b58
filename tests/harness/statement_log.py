"""The statements and round trips of Postgres clients, read from the wire: the same on any machine."""

import struct
from collections.abc import Callable

_START_UP = struct.Struct(">II")
_HEAD = struct.Struct(">cI")
_ENCRYPTION_REQUESTS = (80877103, 80877104)  # for TLS and for GSSAPI; the start-up message follows


class StatementLog:
    """Records the text of every executed statement, and the number of round trips."""

    def __init__(self) -> None:
        self.executed: list[str] = []
        self.round_trips = 0

    def clear(self) -> None:
        """Forget everything but the prepared statements."""
        self.executed.clear()
        self.round_trips = 0

    def watch(self) -> Callable[[bytes], None]:
        """Return a watcher for one connection, called with what its client sends."""
        return _Connection(self).see


class _Connection:
    def __init__(self, log: StatementLog) -> None:
        self._log = log
        self._seen = b""
        self._has_started = False
        self._prepared: dict[bytes, str] = {}
        self._bound = b""

    def see(self, chunk: bytes) -> None:
        self._seen += chunk
        while self._take():
            pass

    def _take(self) -> bool:
        """Read the next message. False if it is not complete yet."""
        if not self._has_started:
            return self._take_start_up()
        if len(self._seen) < _HEAD.size:
            return False
        kind, length = _HEAD.unpack_from(self._seen)
        if len(self._seen) <= length:
            return False
        content, self._seen = self._seen[_HEAD.size : length + 1], self._seen[length + 1 :]
        self._read(kind, content)
        return True

    def _take_start_up(self) -> bool:
        if len(self._seen) < _START_UP.size:
            return False
        length, code = _START_UP.unpack_from(self._seen)
        if len(self._seen) < length:
            return False
        self._seen = self._seen[length:]
        self._has_started = code not in _ENCRYPTION_REQUESTS
        return True

    def _read(self, kind: bytes, content: bytes) -> None:
        match kind:
            case b"P":  # Parse: the name of the statement, its text
                name, text, _ = content.split(b"\0", 2)
                self._prepared[name] = text.decode()
            case b"B":  # Bind: the name of the portal, that of the statement
                self._bound = content.split(b"\0", 2)[1]
            case b"E":  # Execute
                self._log.executed.append(self._prepared[self._bound])
            case b"Q":  # a simple query
                self._log.executed.append(content[:-1].decode())
                self._log.round_trips += 1
            case b"S" | b"H":  # Sync, Flush
                self._log.round_trips += 1
