"""Serves the documents, and a page for the HTTP API, which loads nothing from other servers."""

import re
from html import escape
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from litestar import MediaType, Request, Response, Router, get
from litestar.datastructures import ResponseHeader
from litestar.exceptions import NotFoundException
from litestar.openapi.plugins import OpenAPIRenderPlugin
from litestar.response import Redirect

from service.authentication.access_tokens import READ, WRITE
from service.outbox import asyncapi
from service.settings import ServiceSettings

_OUR_OWN = Path(__file__).parent / "static"
_PAGE = Template((_OUR_OWN / "page.html").read_text())
# RapiDoc 9.3 comes from `openapi-ui-bundles`, which has no dependencies. Packages with a newer RapiDoc need
# Flask or Pydantic. It has 660 KB, so all callers share it: slow readers keep it in memory for long.
_RAPIDOC = resources.files("openapi_ui_bundles.rapidoc") / "vendor" / "rapidoc-min.js"
_ASSETS = {
    "/schema/rapidoc-min.js": ("text/javascript", _RAPIDOC.read_bytes()),
    "/schema/page.css": ("text/css", (_OUR_OWN / "page.css").read_bytes()),
    "/schema/page.js": ("text/javascript", (_OUR_OWN / "page.js").read_bytes()),
}


@get("/", sync_to_thread=False, include_in_schema=False)
def lead_to_page() -> Redirect:
    """Lead people who open the API's address to its page."""
    return Redirect("/schema")


class ApiPage(OpenAPIRenderPlugin):
    """The page of the HTTP API: how to get a token, and RapiDoc."""

    def render(self, request: Request[Any, Any, Any], generated: dict[str, Any]) -> bytes:
        """Return the page."""
        settings: ServiceSettings = request.app.state.resources.settings
        audience = settings.auth_audience
        named = {
            "summary": generated["info"]["summary"],
            "issuer": settings.auth_issuer,
            "audience": "" if audience is None else f"the audience {audience},",
            "write": settings.auth_scope_prefix + WRITE,
            "read": settings.auth_scope_prefix + READ,
            "claim": settings.auth_client_claim,
        }
        texts = {name: escape(text) for name, text in named.items()}
        contents = "".join(
            f'<li><a href="#{method}-{re.sub("[{}]", "-", path)}">{method.upper()} {path}</a>'
            for path, item in generated["paths"].items()
            for method in item
        )
        return _PAGE.substitute(texts, contents=contents).encode()


@get("/asyncapi.json", sync_to_thread=True)
def asyncapi_document() -> Response[bytes]:
    """Return the AsyncAPI document."""
    return Response(msgspec.json.encode(asyncapi.document()), media_type=MediaType.JSON)


@get([path.removeprefix("/schema") for path in _ASSETS], sync_to_thread=False)
def asset(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return a file that the page loads."""
    media_type, content = _ASSETS[request.scope["path"]]
    return Response(content, media_type=media_type)


def _refuse_unknown(response: Response[Any]) -> Response[Any]:
    """Replace Litestar's own page for other paths below /schema by our answer."""
    if response.status_code == HTTPStatus.NOT_FOUND:
        raise NotFoundException
    return response


def router() -> Router:
    """Return the routes below /schema. Their policy lets the browser contact only this server."""
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Router(
        "/schema",
        route_handlers=[asyncapi_document, asset],
        response_headers=[ResponseHeader(name="Content-Security-Policy", value=policy)],
        after_request=_refuse_unknown,
        include_in_schema=False,
    )
