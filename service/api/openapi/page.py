"""Serves the documents, and a page for the HTTP API, which loads nothing from other servers."""

import re
from functools import cache
from html import escape
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from litestar import MediaType, Request, Response, Router, get
from litestar.datastructures import ResponseHeader
from litestar.exceptions import NotFoundException
from litestar.openapi.plugins import OpenAPIRenderPlugin
from litestar.response import Redirect

from service.api.openapi import documenting, examples
from service.authentication.access_tokens import READ, WRITE
from service.outbox import asyncapi
from service.settings import ServiceSettings

# RapiDoc 9.3 comes from `openapi-ui-bundles`, which has no dependencies. Packages with a newer RapiDoc need
# Flask or Pydantic.
_RAPIDOC = resources.files("openapi_ui_bundles.rapidoc") / "vendor"
_FIRST_BODY = escape(msgspec.json.format(msgspec.json.encode(examples.SMALLEST_REQUEST)).decode())
_OUR_OWN = Path(__file__).parent / "static"
_ASSETS = {
    "rapidoc-min.js": (_RAPIDOC, "text/javascript"),
    "page.css": (_OUR_OWN, "text/css"),
    "page.js": (_OUR_OWN, "text/javascript"),
}


@get("/", sync_to_thread=False, include_in_schema=False)
def lead_to_page() -> Redirect:
    """Lead people who open the API's address to its page."""
    return Redirect("/schema")


class ApiPage(OpenAPIRenderPlugin):
    """The page of the HTTP API: how to get a token, and RapiDoc."""

    def render(self, request: Request[Any, Any, Any], _generated: dict[str, Any]) -> bytes:
        """Return the page."""
        settings: ServiceSettings = request.app.state.resources.settings
        document = documenting.complete(request.app)
        prefix = escape(settings.auth_scope_prefix)
        audience = settings.auth_audience
        of_audience = f"the audience <code>{escape(audience)}</code>, " if audience is not None else ""
        page = f"""\
<!DOCTYPE html>
<html lang="en"><head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Calculation requests: HTTP API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/schema/page.css">
<script src="/schema/page.js" defer></script>
<script src="/schema/rapidoc-min.js" defer></script>
</head><body>
<rapi-doc spec-url="/schema/openapi.json" render-style="read" show-header="false" load-fonts="false"
 regular-font="system-ui, sans-serif" mono-font="ui-monospace, monospace" font-size="largest"
 show-method-in-nav-bar="as-plain-text" use-path-in-nav-bar="true" sort-endpoints-by="none"
 info-description-headings-in-navbar="true" allow-server-selection="false" allow-search="false"
 allow-advanced-search="false" allow-spec-file-download="false" schema-style="table"
 default-schema-tab="schema" schema-description-expanded="true"
 allow-schema-description-expand-toggle="false">
<header slot="overview">
<p>{document["info"]["summary"]} <a href="/schema/openapi.json">OpenAPI document</a>,
<a href="/schema/asyncapi.json">AsyncAPI document of the events</a></p>
<ul>{_contents(document)}</ul>
<h2>First call</h2>
<p>Access tokens come from the issuer <code>{escape(settings.auth_issuer)}</code>, by the client-credentials
grant of OAuth 2.0. Ask its operators for a client whose tokens have {of_audience}
the scopes <code>{prefix}{WRITE}</code> and <code>{prefix}{READ}</code>, and
your firm in the claim <code>{escape(settings.auth_client_claim)}</code>.</p>
<p>With the token in <code>ACCESS_TOKEN</code>, and the address of this server in <code>BASE_URL</code>,
store a request. It e-mails a link to the customer, so put an address of your own into
<code>customer_email</code>.</p>
<pre>curl "$BASE_URL/v1/request" -H "Authorization: Bearer $ACCESS_TOKEN" \\
  -H "Idempotency-Key: $(date +%s)" -H "Content-Type: application/json" -d '{_FIRST_BODY}'</pre>
<p>You can also make every call from this page: press <button>Enter a token</button>, paste an access token
and press Enter. Then change the <em>Example</em> of the body, and press <em>Try</em>. The questionnaire also
opens with an API key from the operators of this service.</p>
</header>
</rapi-doc>
</body></html>
"""
        return page.encode()


def _contents(document: dict[str, Any]) -> str:
    return "".join(
        f'<li><a href="#{method}-{re.sub("[{}]", "-", path)}">{method.upper()} {path}</a><br>'
        f"{escape(operation['summary'])}</li>"
        for path, item in document["paths"].items()
        for method, operation in item.items()
    )


@get("/asyncapi.json", sync_to_thread=True)
def asyncapi_document() -> Response[bytes]:
    """Return the AsyncAPI document."""
    return Response(msgspec.json.encode(asyncapi.document()), media_type=MediaType.JSON)


@get([f"/{name}" for name in _ASSETS], sync_to_thread=False)
def asset(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return a file that the page loads."""
    name = request.scope["path"].rpartition("/")[2]
    return Response(_content(name), media_type=_ASSETS[name][1])


@cache  # Shared by all callers, because one file has 660 KB, and slow readers keep it in memory for long.
def _content(name: str) -> bytes:
    return (_ASSETS[name][0] / name).read_bytes()


def _refuse_unknown(response: Response[Any]) -> Response[Any]:
    """Replace Litestar's own page for other paths below /schema by our answer."""
    if response.status_code == HTTPStatus.NOT_FOUND:
        raise NotFoundException
    return response


def router(token_url: str | None) -> Router:
    """Return the routes below /schema, to which Litestar adds the page and the OpenAPI document.

    Their policy lets the browser contact only this server and the issuer.
    """
    issuer = urlsplit(token_url or "")
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        f"connect-src 'self'{f' {issuer.scheme}://{issuer.netloc}' if token_url else ''}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return Router(
        "/schema",
        route_handlers=[asyncapi_document, asset],
        response_headers=[ResponseHeader(name="Content-Security-Policy", value=policy)],
        after_request=_refuse_unknown,
        include_in_schema=False,
    )
