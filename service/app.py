"""Assembles the API from its parts."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from litestar import Litestar, get
from litestar.datastructures import State
from litestar.di import Provide
from litestar.types import ASGIApp

from service.api import errors, questionnaire
from service.api.outer_layer import OuterLayer
from service.api.requests import Requests
from service.api.resources import ApiRequest, Resources
from service.authentication.authenticator import Authenticator
from service.authentication.signing_keys import SigningKeys
from service.calculation_requests.request_secrets import SecretKeyRing
from service.calculation_requests.storing import Storage
from service.contracts import page
from service.outbox.lanes import RelayWaker
from service.postgres import schema
from service.postgres.pool import open_pool
from service.server import probes
from service.server.asgi import Response
from service.server.background import in_background
from service.server.limits import LARGEST_BODY
from service.settings import ServiceSettings


def create_app(settings: ServiceSettings) -> ASGIApp:
    """Return the ASGI application: the API in its outer layer. Raises InvalidSetting as `create_api` does."""
    return OuterLayer(create_api(settings))


def create_api(settings: ServiceSettings) -> Litestar:
    """Return the API without its outer layer. Raises InvalidSetting if REQUEST_SECRET_KEYS is malformed."""
    secret_keys = SecretKeyRing.parse(settings.request_secret_keys)
    return Litestar(
        route_handlers=[
            Requests,
            questionnaire.questionnaire_structure,
            answer_probe,
            *page.handlers,
        ],
        lifespan=[partial(_lifespan, settings=settings, secret_keys=secret_keys)],
        dependencies={"resources": Provide(provide_resources, sync_to_thread=False)},
        exception_handlers={Exception: errors.respond},
        request_class=ApiRequest,
        request_max_body_size=LARGEST_BODY,
        openapi_config=None,  # contracts/openapi.py generates the document.
        logging_config=None,  # telemetry/logs.py configures logging.
    )


def provide_resources(state: State) -> Resources:
    """Return what `_lifespan` has opened."""
    resources: Resources = state.resources
    return resources


@get([*probes.PATHS])
async def answer_probe(request: ApiRequest[None]) -> Response:
    """Answer a probe. It needs no authentication."""
    return await probes.answer(request.scope["path"], request.app.state.checks)


@asynccontextmanager
async def _lifespan(
    app: Litestar, *, settings: ServiceSettings, secret_keys: SecretKeyRing
) -> AsyncIterator[None]:
    """Open the resources that the handlers use, and close them in reverse order."""
    seconds = settings.database_timeout_seconds
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(settings))
        signing_keys = SigningKeys(settings.auth_jwks_url)
        relay = RelayWaker(pool, seconds=seconds)
        await stack.enter_async_context(in_background("signing_keys", signing_keys.run))
        await stack.enter_async_context(in_background("relay_waker", relay.run))
        app.state.resources = Resources(
            settings=settings,
            authenticator=Authenticator(settings, signing_keys, pool),
            pool=pool,
            storage=Storage(pool, relay, seconds=seconds),
            secret_keys=secret_keys,
        )
        app.state.checks = {"postgres": probes.lasting(schema.readiness(pool, seconds=seconds), pool)}
        yield
