"""The facts about an HTTP request that its log lines show."""

from typing import Any

import msgspec

from service.identifiers import parse_uuid
from service.server.asgi import Scope
from service.telemetry import logs


class LogFacts(msgspec.Struct):
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


def begin(scope: Scope, traceparent: str) -> LogFacts:
    """Begin the facts about an HTTP request. `of` then finds them, also in a copy of *scope*."""
    facts = LogFacts(traceparent)
    scope.setdefault("state", {})["log_facts"] = facts
    return facts


def of(scope: Scope) -> LogFacts:
    """Return the facts about an HTTP request."""
    facts: LogFacts = scope["state"]["log_facts"]
    return facts


def uuid_in_path(scope: Scope) -> str | None:
    """Return the uuid of a request for a calculation, if the path has one: otherwise it may hold anything."""
    uuid = scope.get("path_params", {}).get("uuid", "")
    return uuid if parse_uuid(uuid) else None
