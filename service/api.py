"""The endpoints: one handler, one transaction, on one screen."""

from typing import Any

import msgspec
from litestar import MediaType, Request, get, post
from litestar.datastructures import State
from litestar.params import FromPath

from service import auth, calculation_requests, conveyancers, postgres, telemetry, tracing
from service.auth import Caller
from service.calculation_requests import CalculationRequestRecord, RequestNotFound
from service.envelope import Envelope, UnsupportedMediaType, succeed
from service.identifiers import parse_uuid
from service.postgres import Pool
from service.questionnaire import Questionnaire
from service.relay_waker import RelayWaker
from service.request_secrets import SecretKeyRing
from service.settings import ServiceSettings
from service.submissions import Draft


class Resources(msgspec.Struct, frozen=True):
    """What the handlers work with; the lifespan opens it."""

    settings: ServiceSettings
    pool: Pool
    keys: SecretKeyRing
    relay: RelayWaker
    questionnaire: Questionnaire


class ApiRequest(Request[Caller, Any, State]):
    """An HTTP request to the API, with its caller as `user`."""

    @property
    def resources(self) -> Resources:
        """What the lifespan has opened."""
        resources: Resources = self.app.state.resources
        return resources


@post("/v1/request", status_code=200, guards=[auth.requires(auth.WRITE)])
async def create_request(request: ApiRequest) -> Envelope[CalculationRequestRecord]:
    """Store a request for a calculation; its e-mail and its calculation follow."""
    resources = request.resources
    draft = Draft(await _json_body(request))
    conveyancer_id = request.user.conveyancer_id
    seconds = resources.settings.database_timeout_seconds
    waiver_applies = False
    if draft.asks_for_waiver:
        async with postgres.connection(resources.pool, seconds=seconds) as connection:
            waiver_applies = await conveyancers.charges_calculation_fee(connection, conveyancer_id)
    submission = draft.validated(waiver_applies=waiver_applies)
    async with postgres.connection(resources.pool, seconds=seconds) as connection:
        stored = await calculation_requests.insert(
            connection,
            submission,
            conveyancer_id=conveyancer_id,
            keys=resources.keys,
            traceparent=tracing.onward(telemetry.traceparent(request.headers)),
        )
    resources.relay.wake()
    return succeed(stored.record(resources.keys, resources.settings.app_url))


@get("/v1/request/{uuid:str}", guards=[auth.requires(auth.READ)])
async def retrieve_request(request: ApiRequest, uuid: FromPath[str]) -> Envelope[CalculationRequestRecord]:
    """Read a request back."""
    resources = request.resources
    request_id = parse_uuid(uuid)
    if request_id is None:
        raise RequestNotFound
    seconds = resources.settings.database_timeout_seconds
    async with postgres.connection(resources.pool, seconds=seconds) as connection:
        stored = await calculation_requests.find(
            connection, request_id, conveyancer_id=request.user.conveyancer_id
        )
    return succeed(stored.record(resources.keys, resources.settings.app_url))


@get("/v1/questionnaire/structure", guards=[auth.requires_api_key_or_token])
async def questionnaire_structure(request: ApiRequest) -> Envelope[Questionnaire]:
    """Return the questions from which a form is built."""
    return succeed(request.resources.questionnaire)


async def _json_body(request: ApiRequest) -> bytes:
    media_type, _ = request.content_type
    if media_type != MediaType.JSON:
        raise UnsupportedMediaType
    return await request.body()
