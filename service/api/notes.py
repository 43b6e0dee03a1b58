"""What the parts that serve an HTTP request note for its line in the access log."""

from typing import Any

import msgspec

from service.identifiers import parse_uuid
from service.server.asgi import Scope
from service.telemetry import logs


class Notes(msgspec.Struct):
    """The trace of an HTTP request, the calculation request that it is about, and why it was refused."""

    traceparent: str
    uuid: str | None = None
    error_codes: tuple[str, ...] = ()

    def note_uuid(self, uuid: str | None) -> None:
        """Note which calculation request this is about."""
        self.uuid = uuid

    def describe(self) -> dict[str, Any]:
        """Return the fields of the log line."""
        fields = logs.about(self.uuid, self.traceparent)
        if self.error_codes:
            fields["error_codes"] = self.error_codes
        return fields


def begin(scope: Scope, traceparent: str) -> Notes:
    """Begin the notes on an HTTP request. `of` then finds them, also in a copy of *scope*."""
    noted = Notes(traceparent)
    scope.setdefault("state", {})["notes"] = noted
    return noted


def of(scope: Scope) -> Notes:
    """Return the notes on an HTTP request."""
    noted: Notes = scope["state"]["notes"]
    return noted


def uuid_in_path(scope: Scope) -> str | None:
    """Return the uuid of a request for a calculation, if the path has one: otherwise it may hold anything."""
    uuid = scope.get("path_params", {}).get("uuid", "")
    return uuid if parse_uuid(uuid) else None
