"""The statements and round trips of Postgres clients, read from the wire: the same on any machine."""

import struct
from collections.abc import Callable

# The start-up message follows a request for TLS or for GSSAPI, and has no type, either.
_ENCRYPTION_REQUESTS = (struct.pack(">I", 80877103), struct.pack(">I", 80877104))


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
        while (end := self._end_of_first()) is not None and len(self._seen) >= end:
            message, self._seen = self._seen[:end], self._seen[end:]
            if self._has_started:
                self._read(message[:1], message[5:])
            else:
                self._has_started = message[4:8] not in _ENCRYPTION_REQUESTS

    def _end_of_first(self) -> int | None:
        """Return where the first message ends, if it can be known."""
        before_length = 1 if self._has_started else 0  # the type
        length = self._seen[before_length : before_length + 4]
        return before_length + int.from_bytes(length, "big") if len(length) == 4 else None

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
