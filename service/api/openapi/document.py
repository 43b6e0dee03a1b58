"""The OpenAPI document: what concerns all endpoints. Litestar takes the rest from the handlers."""

from functools import partial
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
_ABOUT = f"""\
# First call

Store a request, with an access token in `ACCESS_TOKEN`, and the address of this server in `BASE_URL`. The
customer is e-mailed a link, so put an address of your own into `customer_email`.

```sh
curl "$BASE_URL/v1/request" -H "Authorization: Bearer $ACCESS_TOKEN" \\
  -H "Idempotency-Key: $(date +%s)" -H "Content-Type: application/json" -d '{_FIRST_BODY}'
```

# Headers

Any call may have an `X-Request-Id`, which is repeated in the answer and logged if it has at most 128 letters,
digits, `.`, `_` or `-`, and begins with a letter or digit; otherwise it is replaced. Any call may have a
`traceparent` (W3C Trace Context), which is passed on with the events.

# Errors

Every answer is an envelope. On success `errors` is null; on failure `data` is null and `errors` lists every
failing field at once. Distinguish errors by `code`. Besides what the examples show, a field can be refused
as `blank`, `too_long`, `too_deep`, `invalid_type`, `invalid_choice` or `invalid_characters`. If a query
parameter is given twice, the code is `repeated`.

Besides the answers listed here: a path that does not exist, or is spelt differently (with a double or
trailing slash, or percent-encoded), gets 404 `not_found`. A method that a path does not have gets 405
`method_not_allowed` and the header `Allow`. An invalid `Host` gets 400 `malformed_request`. A
`Transfer-Encoding` other than `chunked` gets 501 `unsupported_transfer_encoding`. Input that is not HTTP gets
400, and a request line and headers larger than 64 KiB get 431, both without a body. Each path that has GET
also has HEAD, which is GET without the body. OPTIONS gets 204 and `Allow`.

# Retries

A call without an answer may have done its work. Send it again, with the same `Idempotency-Key`, `cursor` or
`after`: then a repeat of a create or of a GET is harmless. Do the same after 408, 500, 503 and 409
`idempotency_key_in_flight`, and after 429, 502 and 504, which come from a gateway and have another body.
After 401, and after 409 `too_many_emails`, try once more: after 401 with a new token. After any other 4xx,
and after 501, correct the call.

Wait for the seconds in `Retry-After`, which every 503 of this service has. Without that header, wait for a
second, then twice as long each time, up to a minute. Multiply each wait by a random number from 1 to 1.5, so
that your retries do not all come at once.

# Versions

New fields, error codes and types of events may be added within this version: ignore fields and events that
you do not know, and decide about an error with an unknown code by its HTTP status. The version of this
document is the version in the paths. Such additions do not change it."""


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
