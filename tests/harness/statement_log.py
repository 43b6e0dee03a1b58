"""The statements and round trips of Postgres clients, read from the wire: the same on any machine."""

import struct
from collections.abc import Callable, Generator

# The start-up message follows a request for TLS or for GSSAPI, and has no type, either.
_ENCRYPTION_REQUESTS = (struct.pack(">I", 80877103), struct.pack(">I", 80877104))


class StatementLog:
    """Records the text of every executed statement, and the number of round trips."""

    def __init__(self) -> None:
        self.executed: list[str] = []
        self.round_trips = 0

    def clear(self) -> None:
        self.executed.clear()
        self.round_trips = 0

    def watch(self) -> Callable[[bytes], None]:
        """Return a watcher for one connection, called with what its client sends."""
        reading = self._read()
        next(reading)
        return reading.send

    def _read(self) -> Generator[None, bytes, None]:
        seen, bound, prepared = b"", b"", dict[bytes, str]()
        before_length = 0  # a type, from the start-up message on
        while True:
            while len(seen) < before_length + 4 or len(seen) < (
                end := before_length + int.from_bytes(seen[before_length : before_length + 4])
            ):
                seen += yield
            message, seen = seen[:end], seen[end:]
            kind, content = message[:1], message[5:]
            if not before_length:
                before_length = int(message[4:8] not in _ENCRYPTION_REQUESTS)
            elif kind == b"P":  # Parse: the name of the statement, its text
                name, text, _ = content.split(b"\0", 2)
                prepared[name] = text.decode()
            elif kind == b"B":  # Bind: the name of the portal, that of the statement
                bound = content.split(b"\0", 2)[1]
            elif kind == b"E":  # Execute
                self.executed.append(prepared[bound])
            elif kind == b"Q":  # a simple query
                self.executed.append(content[:-1].decode())
            self.round_trips += kind in (b"Q", b"S", b"H")  # Sync and Flush, too
