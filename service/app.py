"""Assembles the API from its parts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from litestar import HttpMethod, Litestar, Request, Response
from litestar.datastructures import State
from litestar.status_codes import HTTP_204_NO_CONTENT

from service.api import errors
from service.api.api_request import ApiRequest
from service.api.controllers import events, questionnaire
from service.api.controllers.changes import Changes
from service.api.controllers.requests import Requests
from service.api.openapi import document, documenting, page
from service.api.resources import Resources
from service.authentication.authenticator import Authenticator
from service.authentication.signing_keys import SigningKeys, SigningKeysUnavailable
from service.calculation_requests.request_secrets import SecretKeyRing
from service.calculation_requests.storing import Storage
from service.outbox.waking import RelayWaker
from service.postgres.pool import open_pool
from service.server import probes
from service.server.background import in_background
from service.server.limits import LARGEST_BODY
from service.settings import ServiceSettings, load

ENDPOINTS: list[Any] = [Requests, Changes, events.read_feed, questionnaire.questionnaire_structure]


def create_app(settings: ServiceSettings | None = None) -> Litestar:
    """Return the API, with settings from the environment by default. Raises InvalidSetting.

    `serve` puts it into the OuterLayer, which logs and counts. `litestar run` has neither layer nor probes.
    """
    settings = settings or load(ServiceSettings)
    secret_keys = SecretKeyRing.parse(settings.request_secret_keys)
    return Litestar(
        route_handlers=[*ENDPOINTS, page.lead_to_page],
        state=State({"checks": {}}),
        lifespan=[partial(_lifespan, settings=settings, secret_keys=secret_keys)],
        openapi_config=document.config(),
        logging_config=None,  # telemetry/logs.py configures logging.
        **of_endpoints(),
    )


def describe() -> dict[str, Any]:
    """Return the OpenAPI document, which needs no settings."""
    return documenting.complete(Litestar(ENDPOINTS, openapi_config=document.config(), **of_endpoints()))


def of_endpoints() -> dict[str, Any]:
    """Return what endpoints need of their application."""
    return {
        "before_request": answer_options,
        "exception_handlers": {Exception: errors.respond},
        "request_class": ApiRequest,
        "request_max_body_size": LARGEST_BODY,
        "return_dto": None,  # Otherwise a handler's body decoder would also encode its answer.
    }


async def answer_options(request: Request[Any, Any, Any]) -> Response[None] | None:
    """Answer OPTIONS. Litestar's own answer lists only the methods of the path's first handler."""
    if request.method != HttpMethod.OPTIONS:
        return None
    path = request.scope["path_template"]
    methods = next(route.methods for route in request.app.routes if route.path_format == path)
    return Response(None, status_code=HTTP_204_NO_CONTENT, headers={"allow": ", ".join(sorted(methods))})


@asynccontextmanager
async def _lifespan(
    app: Litestar, *, settings: ServiceSettings, secret_keys: SecretKeyRing
) -> AsyncIterator[None]:
    seconds = settings.database_timeout_seconds
    async with open_pool(settings) as pool:
        signing_keys = SigningKeys(settings.auth_jwks_url)
        with suppress(SigningKeysUnavailable):  # The failure was logged, and fetches go on in the background.
            await signing_keys.refresh()
        relay = RelayWaker(pool, seconds=seconds)
        app.state.resources = Resources(
            settings=settings,
            authenticator=Authenticator(settings, signing_keys, pool),
            pool=pool,
            relay=relay,
            storage=Storage(pool, relay, seconds=seconds),
            secret_keys=secret_keys,
        )
        app.state.checks["postgres"] = probes.lasting_readiness(pool, seconds=seconds)
        async with in_background("signing_keys", signing_keys.run), in_background("relay_waker", relay.run):
            yield
