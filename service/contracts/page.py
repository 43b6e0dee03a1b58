"""The documents over HTTP, and pages to read them, which load nothing from elsewhere."""

from collections.abc import Mapping
from functools import cache
from urllib.parse import urlsplit

import msgspec
from litestar import MediaType, Response, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from service.api.handlers import ApiRequest
from service.contracts import api_page, assets, asyncapi, events_page, openapi
from service.contracts.assets import Content
from service.settings import ServiceSettings

_FOR_A_YEAR = {"Cache-Control": "public, max-age=31536000, immutable"}


@get("/schema", sync_to_thread=True)
def show_api(request: ApiRequest[None]) -> Response[bytes]:
    """Return the page of the HTTP API."""
    settings = request.resources.settings
    return _api_page(settings).answer(request, _policy(settings.auth_token_url))


@get("/schema/events", sync_to_thread=True)
def show_events(request: ApiRequest[None]) -> Response[bytes]:
    """Return the page of the events."""
    return _events_page().answer(request, _policy())


@get("/schema/openapi.json", sync_to_thread=True)
def openapi_document(request: ApiRequest[None]) -> Response[bytes]:
    """Return the OpenAPI document."""
    return _openapi_document(request.resources.settings.auth_token_url).answer(request)


@get("/schema/asyncapi.json", sync_to_thread=True)
def asyncapi_document(request: ApiRequest[None]) -> Response[bytes]:
    """Return the AsyncAPI document."""
    return _asyncapi_document().answer(request)


@get("/schema/{asset:str}", sync_to_thread=True)
def asset(request: ApiRequest[None], asset: FromPath[str]) -> Response[bytes]:
    """Return a file that a page loads."""
    if asset not in assets.named():
        raise NotFoundException
    return assets.named()[asset].answer(request, _FOR_A_YEAR)


handlers = [show_api, show_events, openapi_document, asyncapi_document, asset]


@cache
def _api_page(settings: ServiceSettings) -> Content:
    return Content.of(api_page.render(settings).encode(), MediaType.HTML)


@cache
def _events_page() -> Content:
    return Content.of(events_page.render().encode(), MediaType.HTML)


@cache
def _openapi_document(token_url: str | None) -> Content:
    return Content.of(msgspec.json.encode(openapi.document(token_url)), MediaType.JSON)


@cache
def _asyncapi_document() -> Content:
    return Content.of(msgspec.json.encode(asyncapi.document()), MediaType.JSON)


def _policy(token_url: str | None = None) -> Mapping[str, str]:
    """Return the header that keeps the browser from contacting any server but this and the issuer's."""
    callable_servers = "'self'"
    if token_url is not None:
        issuer = urlsplit(token_url)
        callable_servers += f" {issuer.scheme}://{issuer.netloc}"
    return {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        f"img-src 'self' data:; connect-src {callable_servers}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    }
