"""The API as a list of its parts."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from litestar import Litestar
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.types import ASGIApp

from service import postgres, questionnaire, tracing
from service.access_log import AccessLog
from service.api import ApiRequest, Resources, create_request, questionnaire_structure, retrieve_request
from service.auth import Authenticator
from service.background import in_background
from service.envelope import as_envelope
from service.health import livez, nothing_to_read, readyz, show_metrics
from service.http_tracing import TracedRequests
from service.relay_waker import RelayWaker
from service.request_secrets import SecretKeyRing
from service.settings import ServiceSettings
from service.signing_keys import open_signing_keys

LARGEST_BODY = 64 * 1024


def create_app(settings: ServiceSettings) -> ASGIApp:
    """Return the ASGI application. Raises InvalidSetting when the key ring cannot be read."""
    keys = SecretKeyRing.parse(settings.request_secret_keys)
    app = Litestar(
        route_handlers=[
            create_request,
            retrieve_request,
            questionnaire_structure,
            livez,
            readyz,
            show_metrics,
        ],
        lifespan=[partial(open_resources, settings=settings, keys=keys)],
        exception_handlers={Exception: as_envelope},
        request_class=ApiRequest,
        request_max_body_size=LARGEST_BODY,
        openapi_config=OpenAPIConfig(
            title="Calculation requests", version="1", render_plugins=[JsonRenderPlugin()]
        ),
        logging_config=None,  # telemetry.configure() has the last word on logging.
    )
    logged = AccessLog(app)
    return TracedRequests(logged) if tracing.is_on() else logged


@asynccontextmanager
async def open_resources(
    app: Litestar, *, settings: ServiceSettings, keys: SecretKeyRing
) -> AsyncIterator[None]:
    """Open what the handlers work with, and close it in reverse."""
    seconds = settings.database_timeout_seconds
    signing_keys = open_signing_keys(settings)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(postgres.open_pool(settings))
        relay = RelayWaker(pool, timeout_seconds=seconds)
        await stack.enter_async_context(in_background(signing_keys.run()))
        await stack.enter_async_context(in_background(relay.run()))
        app.state.checks = {"postgres": postgres.schema_check(pool, seconds=seconds)}
        app.state.read_gauges = nothing_to_read
        app.state.authenticator = Authenticator(settings, signing_keys, pool)
        app.state.resources = Resources(
            settings=settings,
            pool=pool,
            keys=keys,
            relay=relay,
            questionnaire=questionnaire.load(),
        )
        yield
