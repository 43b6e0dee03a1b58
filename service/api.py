"""The endpoints: one handler, one transaction, on one screen."""

from typing import Any

import msgspec
from litestar import MediaType, Request, Response, get, post
from litestar.datastructures import State
from litestar.params import FromPath

from service import auth, calculation_requests, conveyancers, idempotency, listings, postgres, telemetry
from service.auth import Caller
from service.calculation_requests import CalculationRequestRecord, RequestNotFound
from service.envelope import Envelope, UnsupportedMediaType, succeed
from service.idempotency import Idempotency
from service.identifiers import parse_uuid
from service.listings import CalculationRequestPage
from service.operations import REPLAYED, CreateRequest, ListRequests
from service.postgres import Pool
from service.questionnaire import Questionnaire
from service.relay_waker import RelayWaker
from service.request_secrets import SecretKeyRing
from service.settings import ServiceSettings
from service.submissions import Draft

_SHARE_OF_WAIT = 0.8  # of the time for the database: a wait for a key must end before the deadline does


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


@post(
    "/v1/request",
    status_code=200,
    guards=[auth.requires(auth.WRITE)],
    response_headers=[REPLAYED],
    operation_class=CreateRequest,
)
async def create_request(request: ApiRequest) -> Response[Envelope[CalculationRequestRecord]]:
    """Store a request for a calculation; its e-mail and its calculation follow."""
    resources = request.resources
    key = idempotency.parse_key(request.headers.getall("idempotency-key", []))
    draft = Draft(await _json_body(request))
    submission = None if draft.asks_for_waiver else draft.validated(waiver_applies=False)
    conveyancer_id = request.user.conveyancer_id
    seconds = resources.settings.database_timeout_seconds
    async with postgres.connection(resources.pool, seconds=seconds) as connection:
        if submission is None:
            charges = await conveyancers.charges_calculation_fee(connection, conveyancer_id)
            submission = draft.validated(waiver_applies=charges)
        stored, is_repeat = await calculation_requests.insert(
            connection,
            submission,
            conveyancer_id=conveyancer_id,
            keys=resources.keys,
            traceparent=telemetry.traceparent(request.headers),
            idempotency=Idempotency(key, draft.sha256(), seconds * _SHARE_OF_WAIT) if key else None,
        )
    resources.relay.wake()
    record = stored.record(resources.keys, resources.settings.app_url)
    return Response(succeed(record), headers={REPLAYED.name: "true"} if is_repeat else None)


@get("/v1/request", guards=[auth.requires(auth.READ)], operation_class=ListRequests)
async def list_requests(request: ApiRequest) -> Envelope[CalculationRequestPage]:
    """List the caller's requests, newest first."""
    resources = request.resources
    listing = listings.parse_listing(list(request.query_params.multi_items()))
    conveyancer_id = request.user.conveyancer_id
    seconds = resources.settings.database_timeout_seconds
    async with postgres.connection(resources.pool, seconds=seconds) as connection:
        found, next_cursor = await listings.read_page(connection, listing, conveyancer_id=conveyancer_id)
    records = [stored.record(resources.keys, resources.settings.app_url) for stored in found]
    return succeed(CalculationRequestPage(records, next_cursor))


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
