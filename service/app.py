"""The API as a list of its parts."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import msgspec
from litestar import Litestar
from litestar.types import ASGIApp
from prometheus_client import REGISTRY

from service.api import errors, questionnaire
from service.api.access_log import AccessLog
from service.api.admission import Admission
from service.api.exact_paths import ExactPaths
from service.api.handlers import (
    ApiRequest,
    Resources,
    create_request,
    list_requests,
    questionnaire_structure,
    retrieve_request,
    show_methods,
)
from service.api.request_span import TracedRequests
from service.authentication.api_keys import ApiKeyUses
from service.authentication.authenticator import Authenticator
from service.authentication.signing_keys import open_signing_keys
from service.calculation_requests import storing
from service.calculation_requests.request_secrets import SecretKeyRing
from service.contracts import page
from service.outbox.waker import RelayWaker
from service.postgres import pool as postgres
from service.postgres import schema
from service.postgres.group_commit import GroupCommit
from service.server.background import in_background
from service.server.probes import lasting, livez, nothing_to_read, readyz, show_metrics
from service.settings import ServiceSettings
from service.telemetry import api_metrics, tracing

LARGEST_BODY = 256 * 1024


def create_app(settings: ServiceSettings) -> ASGIApp:
    """Return the ASGI application. Raises InvalidSetting when the key ring cannot be read."""
    logged = AccessLog(ExactPaths(create_api(settings)))
    return TracedRequests(logged) if tracing.is_on() else logged


def create_api(settings: ServiceSettings) -> Litestar:
    """Return the routes and what they work with, without the layers around them."""
    keys = SecretKeyRing.parse(settings.request_secret_keys)
    return Litestar(
        route_handlers=[
            show_methods,  # First, or Litestar answers OPTIONS itself.
            create_request,
            list_requests,
            retrieve_request,
            questionnaire_structure,
            livez,
            readyz,
            show_metrics,
            *page.handlers,
        ],
        lifespan=[partial(open_resources, settings=settings, keys=keys)],
        exception_handlers={Exception: errors.respond},
        request_class=ApiRequest,
        request_max_body_size=LARGEST_BODY,
        openapi_config=None,  # service.openapi says more than Litestar could know.
        logging_config=None,  # telemetry.configure() has the last word on logging.
    )


@asynccontextmanager
async def open_resources(
    app: Litestar, *, settings: ServiceSettings, keys: SecretKeyRing
) -> AsyncIterator[None]:
    """Open what the handlers work with, and close it in reverse."""
    seconds = settings.database_timeout_seconds
    questions = questionnaire.load()
    signing_keys = open_signing_keys(settings)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(postgres.open_pool(settings))
        relay = RelayWaker(pool, timeout_seconds=seconds)
        await stack.enter_async_context(in_background("signing_keys", signing_keys.run))
        await stack.enter_async_context(in_background("relay_waker", relay.run))
        api_key_uses = ApiKeyUses(
            pool, interval_seconds=settings.api_key_use_seconds, timeout_seconds=seconds
        )
        await stack.enter_async_context(in_background("api_key_uses", api_key_uses.run))
        app.state.checks = {"postgres": lasting(schema.readiness(pool, seconds=seconds))}
        app.state.read_gauges = nothing_to_read
        app.state.registries = [REGISTRY, api_metrics.REGISTRY]
        app.state.resources = Resources(
            settings=settings,
            admission=Admission(Authenticator(settings, signing_keys, pool, api_key_uses), pool),
            pool=pool,
            group_commit=GroupCommit(pool, storing.INSERT, seconds=seconds),
            keys=keys,
            relay=relay,
            questionnaire=msgspec.Raw(msgspec.json.encode(questions)),
            questionnaire_etag=questionnaire.entity_tag(questions),
        )
        yield
