"""The page of the HTTP API: a first call, how to get a token, and Swagger UI."""

import shlex

import msgspec

from service.authentication.authenticator import READ, WRITE
from service.contracts import assets
from service.contracts.layout import example, page, words
from service.contracts.operations import SMALLEST_REQUEST
from service.settings import ServiceSettings

_ORIGIN = "https://api.example.com"  # until the page's script has written the one that it came from
_SCOPES = f"{WRITE} {READ}"


def render(settings: ServiceSettings) -> str:
    """Return the page as HTML."""
    return page(
        "/schema",
        f"""\
<h2>A first call</h2>
{_create()}
<p>This stores a request, and e-mails its customer a link: put in an address of your own.</p>
<h2>An access token</h2>
{_token(settings)}
<p>To try out the calls below, press <em>Authorize</em> and paste an access token. For the questionnaire, an
API key from the operators of this service is enough.</p>
""",
        head=f'<link rel="stylesheet" href="{assets.url("swagger-ui.css")}">\n',
        after=f"""\
<div id="operations"></div>
<script src="{assets.url("swagger-ui-bundle.js")}"></script>
<script src="{assets.url("page.js")}"></script>
""",
    )


def _create() -> str:
    body = msgspec.json.format(msgspec.json.encode(SMALLEST_REQUEST)).decode()
    command = f"""\
curl -s {_ORIGIN}/v1/request \\
  -H "Authorization: Bearer $ACCESS_TOKEN" \\
  -H 'Content-Type: application/json' \\
  -d {shlex.quote(body)}"""
    return example(command).replace(_ORIGIN, f'<span class="origin">{_ORIGIN}</span>')


def _token(settings: ServiceSettings) -> str:
    about = words(
        f"Access tokens come from the issuer `{settings.auth_issuer}`, by the client-credentials grant of "
        "OAuth 2.0. Ask its operators for a client whose tokens have the audience "
        f"`{settings.auth_audience}`, the scopes `{WRITE}` and `{READ}`, "
        f"and your firm in the claim `{settings.auth_tenant_claim}`"
    )
    if settings.auth_token_url is None:
        return f"<p>{about}, and for the URL of its token endpoint.</p>"
    command = f"""\
curl -s {shlex.quote(settings.auth_token_url)} \\
  -u "$CLIENT_ID:$CLIENT_SECRET" \\
  -d grant_type=client_credentials \\
  -d {shlex.quote(f"scope={_SCOPES}")}"""
    return f"""\
<p>{about}. With its id and secret:</p>
{example(command)}
<p>The <code>access_token</code> of its answer is the <code>$ACCESS_TOKEN</code> above until it expires.</p>
"""
