"""The documents over HTTP, and the page of the HTTP API, which loads nothing from elsewhere."""

import hashlib
import shlex
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from litestar import MediaType, Response, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from service.api.resources import ApiRequest
from service.authentication.authenticator import READ, WRITE
from service.contracts import asyncapi, openapi
from service.contracts.operations import SMALLEST_REQUEST
from service.settings import ServiceSettings

# Swagger UI comes from `openapi-ui-bundles` (5.17, no dependencies): packages with newer versions depend on
# Django or FastAPI.
_SWAGGER_UI = resources.files("openapi_ui_bundles.swagger_ui") / "vendor"
_OUR_OWN = Path(__file__).parent / "static"
_ASSETS = {
    "swagger-ui.css": (_SWAGGER_UI, "text/css"),
    "swagger-ui-bundle.js": (_SWAGGER_UI, "text/javascript"),
    "favicon-32x32.png": (_SWAGGER_UI, "image/png"),
    "page.css": (_OUR_OWN, "text/css"),
    "page.js": (_OUR_OWN, "text/javascript"),
}
_NO_SNIFFING = ("X-Content-Type-Options", "nosniff")
_FOR_A_YEAR = ("Cache-Control", "public, max-age=31536000, immutable")
_ORIGIN = "https://api.example.com"  # until the page's script has written the one that it came from


@get("/schema", sync_to_thread=True)
def show_api(request: ApiRequest[None]) -> Response[bytes]:
    """Return the page of the HTTP API."""
    settings = request.resources.settings
    policy = _policy(settings.auth_token_url)
    return _answer(_render(settings).encode(), MediaType.HTML, ("Content-Security-Policy", policy))


@get("/schema/openapi.json", sync_to_thread=True)
def openapi_document(request: ApiRequest[None]) -> Response[bytes]:
    """Return the OpenAPI document."""
    return _answer(_openapi_document(request.resources.settings.auth_token_url), MediaType.JSON)


@get("/schema/asyncapi.json", sync_to_thread=True)
def asyncapi_document() -> Response[bytes]:
    """Return the AsyncAPI document."""
    return _answer(_asyncapi_document(), MediaType.JSON)


@get("/schema/{asset:str}", sync_to_thread=True)
def asset(asset: FromPath[str]) -> Response[bytes]:
    """Return a file that the page loads. The page's links to it change with its content: see `_url`."""
    if asset not in _ASSETS:
        raise NotFoundException
    _, media_type = _ASSETS[asset]
    return _answer(_asset(asset), media_type, _FOR_A_YEAR)


handlers = [show_api, openapi_document, asyncapi_document, asset]


def _answer(body: bytes, media_type: str, *headers: tuple[str, str]) -> Response[bytes]:
    return Response(body, media_type=media_type, headers=dict([_NO_SNIFFING, *headers]))


@cache
def _openapi_document(token_url: str | None) -> bytes:
    return msgspec.json.encode(openapi.document(token_url))


@cache
def _asyncapi_document() -> bytes:
    return msgspec.json.encode(asyncapi.document())


@cache
def _asset(name: str) -> bytes:
    folder, _ = _ASSETS[name]
    return (folder / name).read_bytes()


def _url(name: str) -> str:
    """Return the URL of an asset, with a hash of its content: a browser keeps the file until that changes."""
    return f"/schema/{name}?{hashlib.sha256(_asset(name)).hexdigest()[:16]}"


def _policy(token_url: str | None) -> str:
    """Return what keeps the browser from contacting any server but this and the issuer's."""
    issuer = urlsplit(token_url or "")
    return (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        f"connect-src 'self'{f' {issuer.scheme}://{issuer.netloc}' if token_url else ''}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


@cache
def _render(settings: ServiceSettings) -> str:
    """Return the page: a first call, how to get a token, and Swagger UI."""
    body = msgspec.json.format(msgspec.json.encode(SMALLEST_REQUEST)).decode()
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Calculation requests: HTTP API</title>
<link rel="icon" href="{_url("favicon-32x32.png")}">
<link rel="stylesheet" href="{_url("swagger-ui.css")}">
<link rel="stylesheet" href="{_url("page.css")}">
</head>
<body>
<main>
<h1>Calculation requests</h1>
<nav>
<a href="/schema/openapi.json">OpenAPI document</a>
<a href="/schema/asyncapi.json">Events (AsyncAPI document)</a>
</nav>
<h2>A first call</h2>
<pre>curl -s <span class="origin">{_ORIGIN}</span>/v1/request \\
  -H "Authorization: Bearer $ACCESS_TOKEN" \\
  -H 'Content-Type: application/json' \\
  -d {escape(shlex.quote(body))}</pre>
<p>This stores a request, and e-mails its customer a link: put in an address of your own.</p>
<h2>An access token</h2>
{_token(settings)}
<p>To try out the calls below, press <em>Authorize</em> and paste an access token. For the questionnaire, an
API key from the operators of this service is enough.</p>
</main>
<div id="operations"></div>
<script src="{_url("swagger-ui-bundle.js")}"></script>
<script src="{_url("page.js")}"></script>
</body>
</html>
"""


def _token(settings: ServiceSettings) -> str:
    about = (
        f"Access tokens come from the issuer <code>{escape(settings.auth_issuer)}</code>, by the "
        "client-credentials grant of OAuth 2.0. Ask its operators for a client whose tokens have the "
        f"audience <code>{escape(settings.auth_audience)}</code>, the scopes <code>{WRITE}</code> and "
        f"<code>{READ}</code>, and your firm in the claim <code>{escape(settings.auth_tenant_claim)}</code>"
    )
    if settings.auth_token_url is None:
        return f"<p>{about}, and for the URL of its token endpoint.</p>"
    return f"""\
<p>{about}. With its id and secret:</p>
<pre>curl -s {escape(shlex.quote(settings.auth_token_url))} \\
  -u "$CLIENT_ID:$CLIENT_SECRET" \\
  -d grant_type=client_credentials \\
  -d 'scope={WRITE} {READ}'</pre>
<p>The <code>access_token</code> of its answer is the <code>$ACCESS_TOKEN</code> above until it expires.</p>
"""
