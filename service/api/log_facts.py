"""The facts about an HTTP request that its log lines show, beside those that the outer layer binds."""

from typing import Any

import msgspec

from service.identifiers import parse_uuid
from service.server.asgi import Scope


class LogFacts(msgspec.Struct):
    """The trace of an HTTP request, the calculation request that it is about, and why it was refused."""

    traceparent: str
    uuid: str | None = None
    error_codes: tuple[str, ...] = ()


def begin(scope: Scope, traceparent: str) -> None:
    """Begin the facts about an HTTP request. `of` then finds them, also in a copy of *scope*."""
    scope.setdefault("state", {})["log_facts"] = LogFacts(traceparent)


def of(scope: Scope) -> LogFacts:
    """Return the facts about an HTTP request."""
    facts: LogFacts = scope["state"]["log_facts"]
    return facts


def describe(scope: Scope) -> dict[str, Any]:
    """Return the fields of a log line. Of the path only a uuid is shown: otherwise it may hold anything."""
    facts = of(scope)
    uuid = facts.uuid or scope.get("path_params", {}).get("uuid")
    fields = {"uuid": uuid} if uuid and parse_uuid(uuid) else {}
    return {**fields, "error_codes": facts.error_codes} if facts.error_codes else fields
