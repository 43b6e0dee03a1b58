"""The OpenAPI document: what concerns all endpoints. Litestar takes the rest from the handlers."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from litestar import MediaType, Request
from litestar.openapi import OpenAPIConfig, spec
from litestar.openapi.plugins import JsonRenderPlugin

from service.api.openapi import documenting, examples, page
from service.authentication.access_tokens import READ, READ_ALL, WRITE
from service.settings import ServiceSettings

_SUMMARY = (
    "Case-management systems store requests for Stamp Duty Land Tax calculations here, on behalf of their "
    "customers, and read them back. Each customer is e-mailed a link."
)
_FIRST_BODY = msgspec.json.format(msgspec.json.encode(examples.SMALLEST_REQUEST)).decode()
# The example of a body is put in, so that it is one that the tests send.
_ABOUT = Path(__file__).with_name("about.md").read_text().strip().replace("BODY", _FIRST_BODY)

_bearer = partial(spec.SecurityScheme, type="http", scheme="bearer")
_SECURITY_SCHEMES: dict[str, spec.SecurityScheme | spec.Reference] = {
    "access_token": _bearer(
        bearer_format="JWT",
        description="An OAuth 2.0 access token (RFC 9068) from the issuer that the service trusts. Writing "
        f"needs the scope `{WRITE}`, reading needs `{READ}`. With `{READ_ALL}`, a client that the operators "
        "have made an internal reader can read any firm's requests and events by uuid, without the secrets, "
        "and the questionnaire. It opens nothing else, and needs no conveyancer.",
    ),
    "request_secret": _bearer(
        bearer_format="43 letters, digits, `-` and `_`",
        description="The `secret` of a request, which is also in its `request_url`. It opens only this "
        "request. The server of the page behind that link sends it. It is never taken from a query string.",
    ),
    "api_key": _bearer(
        bearer_format="cr_<prefix>_<secret>",
        description="An API key, issued by the operators of the service.",
    ),
}


def config() -> OpenAPIConfig:
    """Return Litestar's settings for the document."""
    return OpenAPIConfig(
        title="Calculation requests",
        version="1",
        summary=_SUMMARY,
        description=_ABOUT,
        servers=[spec.Server(url="/", description="The server that this document comes from.")],
        tags=[
            spec.Tag(name="requests", description="Requests for calculations."),
            spec.Tag(name="questionnaire", description="The questions that customers answer."),
        ],
        components=spec.Components(security_schemes=_SECURITY_SCHEMES),
        use_handler_docstrings=True,
        operation_id_creator=lambda handler, *_: handler.handler_name,
        render_plugins=[page.ApiPage(path="/"), Document(media_type=MediaType.JSON)],
        openapi_router=page.router(),
    )


class Document(JsonRenderPlugin):
    """Serves the completed document."""

    def render(self, request: Request[Any, Any, Any], _generated: dict[str, Any]) -> bytes:
        """Return the document in JSON."""
        settings: ServiceSettings = request.app.state.resources.settings
        document = msgspec.json.encode(documenting.complete(request.app))
        # Texts and examples of errors name scopes, too. No prefix has a character that JSON escapes.
        for scope in (READ, WRITE):  # and READ_ALL, which begins with READ
            document = document.replace(scope.encode(), f"{settings.auth_scope_prefix}{scope}".encode())
        return document
