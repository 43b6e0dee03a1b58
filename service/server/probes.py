"""`/livez`, `/readyz` and `/metrics`: in front of the API, and alone in the worker."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TypeAlias

import asyncpg
import msgspec
import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.postgres.schema import SchemaOutdated
from service.server import http_server
from service.server.asgi import PLAIN_TEXT, ASGIApp, Receive, Response, Scope, Send
from service.server.refusals import Refusal, Refuse, refuse_in_plain_text
from service.telemetry import logs, metrics

Check: TypeAlias = Callable[[], Awaitable[None]]
Checks: TypeAlias = Mapping[str, Check]
ReadGauges: TypeAlias = Callable[[], Awaitable[None]]

PATHS = frozenset({"/livez", "/readyz", "/metrics"})

_ALLOW = (b"allow", b"GET, OPTIONS")
_JSON = (b"content-type", b"application/json")
_WRONG_METHOD = Refusal(
    HTTPStatus.METHOD_NOT_ALLOWED,
    "method_not_allowed",
    "This path does not have this method: the Allow header lists those that it has.",
    (_ALLOW,),
)

_log = structlog.get_logger()


class NotReady(Exception):
    """The process lacks something that it needs for its work."""


class Impaired(Exception):
    """The process lacks something, but must go on receiving work."""


def lasting(check: Check, pool: Pool) -> Check:
    """Return a check of Postgres that, once passed, runs again only while the pool has no open connection.

    So a busy process stays ready. An unreachable Postgres no longer fails the check then: it is unreachable
    for every API at once, and if none were ready, callers would get the ingress's answer instead of our 503.
    A rejected login or an outdated schema may concern this process alone, so it still fails the check; after
    a rejected login, so does an unreachable Postgres, until the check passes again.

    Workers do not use this: no callers depend on them, so their readiness says whether they can work now.
    """
    has_passed = False

    async def run() -> None:
        nonlocal has_passed
        if has_passed and pool.open_size:
            return
        try:
            await check()
        except PostgresUnavailable as error:
            has_passed = has_passed and not _is_rejected_login(error)
            if has_passed:
                raise Impaired(_state(error)) from error
            raise
        has_passed = True

    return run


async def no_gauges() -> None:
    """Read the gauges of a process that has none to read."""


class Probes(msgspec.Struct, frozen=True, kw_only=True):
    """An ASGI application: answers the probes' paths, and passes everything else on to *otherwise*."""

    checks: Checks
    registries: Sequence[CollectorRegistry]
    read_gauges: ReadGauges = no_gauges
    otherwise: ASGIApp
    refuse: Refuse

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one ASGI connection."""
        if scope["type"] == "http" and scope["path"] in PATHS:
            return self._serve(scope, receive, send)
        return self.otherwise(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method not in {"GET", "OPTIONS"}:
            await self.refuse(_WRONG_METHOD)(scope, receive, send)
            return
        scope["path_template"] = path  # for the access log
        if method == "OPTIONS":
            response = Response(HTTPStatus.NO_CONTENT, b"", [_ALLOW])
        elif path == "/livez":
            response = _in_json(HTTPStatus.OK, {"status": "alive"})
        elif path == "/readyz":
            response = await self._readiness()
        else:
            response = await self._metrics()
        await response(scope, receive, send)

    async def _readiness(self) -> Response:
        """Run every check, and name the state of each."""
        results = {name: await _result(name, check) for name, check in self.checks.items()}
        is_ready = all(passed for passed, _ in results.values())
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _in_json(status, {name: state for name, (_, state) in results.items()})

    async def _metrics(self) -> Response:
        """Show every metric; gauges whose values are stored elsewhere are read first, in bounded time."""
        await self.read_gauges()
        content_type = (b"content-type", metrics.CONTENT_TYPE.encode())
        return Response(HTTPStatus.OK, metrics.exposition(self.registries), [content_type])


def _in_json(status: HTTPStatus, body: dict[str, str]) -> Response:
    return Response(status, msgspec.json.encode(body), [_JSON])


async def _result(name: str, check: Check) -> tuple[bool, str]:
    try:
        await check()
    except Impaired as error:
        return True, str(error)
    except (NotReady, PostgresUnavailable, SchemaOutdated) as error:
        return False, _state(error)
    except Exception as error:  # noqa: BLE001 - one failing check must not hide the states of the others
        _log.error("readiness_check_failed", check=name, **logs.describe(error))
        return False, "The check failed. The error has been logged."
    return True, "ok"


def _state(error: Exception) -> str:
    if _is_rejected_login(error):
        return "Postgres rejects the login."
    return (error.args and str(error)) or (error.__doc__ or "")


def _is_rejected_login(error: Exception) -> bool:
    return isinstance(error.__cause__, asyncpg.InvalidAuthorizationSpecificationError)


async def serve(
    checks: Checks, read_gauges: ReadGauges, listening: socket.socket, stop: asyncio.Event
) -> None:
    """Serve the probes of a process without an API until *stop*."""
    probes = Probes(
        checks=checks,
        registries=[REGISTRY],
        read_gauges=read_gauges,
        otherwise=_nothing_else,
        refuse=refuse_in_plain_text,
    )
    await http_server.serve(probes, listening, stop, refuse=refuse_in_plain_text, shutdown_seconds=1.0)


async def _nothing_else(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 404. There is nothing to do at startup and shutdown, the scope "lifespan"."""
    if scope["type"] == "http":
        await Response(HTTPStatus.NOT_FOUND, b"Not Found.", [PLAIN_TEXT])(scope, receive, send)
