"""What protects the pages of this server: which calls are refused, and what no page may do."""

from typing import Any

from litestar import Request
from litestar.datastructures import MutableScopeHeaders
from litestar.exceptions import PermissionDeniedException
from litestar.types import Message, Scope

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "frame-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",  # With no-referrer, browsers send forms with `Origin: null`.
    "X-Content-Type-Options": "nosniff",
}


async def refuse_other_sites(request: Request[Any, Any, Any]) -> None:
    """Raise PermissionDeniedException for a form of another site, or a name that it points here."""
    host, port = request.headers.get("Host", ""), request.app.state.settings.port
    is_sent_here = request.method == "GET" or request.headers.get("Origin") == f"http://{host}"
    name, _, given = host.partition(":")  # Browsers leave port 80 out.
    if name not in {"127.0.0.1", "localhost"} or (given or "80") != str(port) or not is_sent_here:
        raise PermissionDeniedException("Open the address that `make run` has printed.")


async def finish(message: Message, scope: Scope) -> None:
    """Add the headers of every response, and write the access log, which has no queries."""
    if message["type"] == "http.response.start":
        path = repr(scope["path"])  # A decoded path may contain line breaks.
        print(scope.get("method"), path, message["status"], flush=True)
        headers = MutableScopeHeaders.from_message(message)
        for name, value in _HEADERS.items():
            headers.setdefault(name, value)
