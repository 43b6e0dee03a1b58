"""The headers that every answer has: X-Request-Id, Cache-Control, and HEAD among the methods of Allow."""

import re

import uuid_utils
from litestar.types import HTTPResponseStartEvent, Scope

_WELL_FORMED = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def x_request_id(scope: Scope) -> bytes:
    """Return the caller's X-Request-Id if it is safe to repeat, otherwise a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _WELL_FORMED.fullmatch(value):
            return value
    return new_x_request_id()


def new_x_request_id() -> bytes:
    """Return an X-Request-Id for a request that came without one."""
    return uuid_utils.uuid4().hex.encode()


def complete(message: HTTPResponseStartEvent, request_id: bytes) -> HTTPResponseStartEvent:
    """Add X-Request-Id, HEAD where GET is allowed, and `no-store` where no Cache-Control is set."""
    headers = [
        (name, value + b", HEAD" if name.lower() == b"allow" and b"GET" in value else value)
        for name, value in message["headers"]
    ]
    headers.append((b"x-request-id", request_id))
    if not any(name.lower() == b"cache-control" for name, _ in headers):
        headers.append((b"cache-control", b"no-store"))
    return {**message, "headers": headers}
