"""The OpenAPI document over HTTP, and Swagger UI to read it, which loads nothing from elsewhere.

Swagger UI comes from `openapi-ui-bundles` (5.17, no dependencies): packages with newer versions depend on
Django or FastAPI.
"""

import base64
import hashlib
from importlib import resources

import msgspec
from litestar import MediaType, Response, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath
from litestar.response import File

from service.contracts import openapi


@get("/schema/openapi.json", sync_to_thread=False)
def openapi_document() -> Response[bytes]:
    """Return the OpenAPI document."""
    return Response(msgspec.json.encode(openapi.document()), media_type=MediaType.JSON)


_ASSETS = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}
# validatorUrl: otherwise the page would send the document to a validator on the internet.
_START = 'SwaggerUIBundle({url: "/schema/openapi.json", dom_id: "#page", validatorUrl: null})'
_PAGE = f"""<!DOCTYPE html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <title>Calculation requests</title>
    <link rel="icon" href="/schema/favicon-32x32.png">
    <link rel="stylesheet" href="/schema/swagger-ui.css">
  </head>
  <body>
    <div id="page"></div>
    <script src="/schema/swagger-ui-bundle.js"></script>
    <script>{_START}</script>
  </body>
</html>
"""
_START_HASH = base64.b64encode(hashlib.sha256(_START.encode()).digest()).decode()
# The policy keeps the browser from contacting any other server.
_PAGE_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'self' 'sha256-{_START_HASH}'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@get("/schema", sync_to_thread=False)
def openapi_page() -> Response[str]:
    """Return the page."""
    return Response(_PAGE, media_type=MediaType.HTML, headers=_PAGE_HEADERS)


@get("/schema/{asset:str}", sync_to_thread=False)
def openapi_asset(asset: FromPath[str]) -> File:
    """Return a file of Swagger UI."""
    if asset not in _ASSETS:
        raise NotFoundException
    folder = resources.files("openapi_ui_bundles.swagger_ui") / "vendor"
    return File(str(folder / asset), media_type=_ASSETS[asset], content_disposition_type="inline")


handlers = [openapi_document, openapi_page, openapi_asset]
