"""The endpoints: one handler, one transaction, on one screen."""

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import HttpMethod, MediaType, Request, Response, get, post, route
from litestar.datastructures import State
from litestar.params import FromPath

from service.api import admission, idempotency_key, list_query
from service.api.admission import Admission
from service.api.envelope import Answer
from service.api.errors import InvalidSubmission, UnsupportedMediaType
from service.api.list_query import CalculationRequestPage
from service.api.request_body import Draft
from service.authentication.authenticator import READ, WRITE, Caller
from service.calculation_requests import conveyancers, reading, request_secrets, storing
from service.calculation_requests.idempotency import Idempotency, IdempotencyKeyInFlight, IdempotencyKeyReused
from service.calculation_requests.model import (
    CalculationRequest,
    CalculationRequestRecord,
    ListedCalculationRequest,
    RequestNotFound,
)
from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing
from service.identifiers import parse_uuid
from service.outbox.waker import RelayWaker
from service.postgres import loans
from service.postgres.group_commit import GroupCommit
from service.postgres.pool import Connection, Pool
from service.settings import ServiceSettings
from service.telemetry import trace_context, tracing

# Of the time for the database, to wait for a key: half may go by in the queue, and the deadline comes last.
_SHARE_OF_WAIT = 0.4
_OPAQUE_TAG = re.compile(r'"[^"]*"')  # of an ETag (RFC 9110, section 8.8.3)


class Resources(msgspec.Struct, frozen=True):
    """What the handlers work with; the lifespan opens it."""

    settings: ServiceSettings
    admission: Admission
    pool: Pool
    group_commit: GroupCommit  # of INSERT
    keys: SecretKeyRing
    relay: RelayWaker
    questionnaire: msgspec.Raw  # encoded once
    questionnaire_etag: str

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Lend a connection for the statements of one HTTP request. Raises PostgresUnavailable."""
        return loans.connection(self.pool, seconds=self.settings.database_timeout_seconds)

    def record(self, stored: CalculationRequest) -> CalculationRequestRecord:
        """Return what the interface shows of a request. Raises SecretKeyMissing."""
        return stored.record(self.keys, self.settings.app_url)

    def listed(self, found: Sequence[CalculationRequest]) -> list[ListedCalculationRequest]:
        """Return what a page shows. A key that is missing costs one request its secret, not the page."""
        shown: list[ListedCalculationRequest] = []
        missing = set()
        for stored in found:
            try:
                shown.append(self.record(stored))
            except SecretKeyMissing as error:
                missing.add(error.key_id)
                shown.append(stored.record_without_secret())
        request_secrets.note_missing(missing)
        return shown


class ApiRequest(Request[Caller, Any, State]):
    """An HTTP request to the API, with its caller as `user`."""

    @property
    def resources(self) -> Resources:
        """What the lifespan has opened."""
        resources: Resources = self.app.state.resources
        return resources


@post("/v1/request", status_code=200, before_request=admission.requires(WRITE))
async def create_request(request: ApiRequest) -> Answer:
    """Store a request for a calculation; its e-mail and its calculation follow."""
    resources = request.resources
    key = idempotency_key.parse_key(request.headers.getall("idempotency-key", []))
    draft = Draft(await _json_body(request))
    submission = None if draft.asks_for_waiver else draft.validated(waiver_applies=False)
    conveyancer_id, keys = request.user.conveyancer_id, resources.keys
    traceparent = tracing.onward(trace_context.traceparent(request.headers))
    if submission is not None and key is None:
        stored = await storing.insert_in_group(
            resources.group_commit,
            submission,
            conveyancer_id=conveyancer_id,
            keys=keys,
            traceparent=traceparent,
        )
        is_repeat = False
    else:
        lock_seconds = resources.settings.database_timeout_seconds * _SHARE_OF_WAIT
        async with resources.connection() as connection:
            stored, is_repeat = await _insert_alone(
                connection,
                draft,
                conveyancer_id=conveyancer_id,
                keys=keys,
                traceparent=traceparent,
                idempotency=Idempotency(key, draft.sha256(), lock_seconds) if key else None,
            )
    if not is_repeat:
        resources.relay.wake()
    headers = [(idempotency_key.REPLAYED.lower().encode(), b"true")] if is_repeat else []
    return Answer.ok(resources.record(stored), *headers)


async def _insert_alone(
    connection: Connection,
    draft: Draft,
    *,
    conveyancer_id: str,
    keys: SecretKeyRing,
    traceparent: str | None,
    idempotency: Idempotency | None,
) -> tuple[CalculationRequest, bool]:
    """Store a request by itself, and return whether it is a repeat. Raises as validation and `insert` do."""
    charges = draft.asks_for_waiver and await conveyancers.charges_calculation_fee(connection, conveyancer_id)
    try:
        submission = draft.validated(waiver_applies=charges)
    except InvalidSubmission:
        if idempotency is None or draft.errors:
            raise
        # The waiver was ignored, if the conveyancer charged no fee when this key was first sent.
        with suppress(IdempotencyKeyInFlight, IdempotencyKeyReused):
            first = await reading.find_first(connection, idempotency, conveyancer_id=conveyancer_id)
            return first, True
        raise
    return await storing.insert(
        connection,
        submission,
        conveyancer_id=conveyancer_id,
        keys=keys,
        traceparent=traceparent,
        idempotency=idempotency,
    )


@get("/v1/request", before_request=admission.requires(READ))
async def list_requests(request: ApiRequest) -> Answer:
    """List the caller's requests, newest first."""
    resources = request.resources
    listing = list_query.parse_listing(request.scope["query_string"])
    conveyancer_id = request.user.conveyancer_id
    async with resources.connection() as connection:
        found, next_cursor = await list_query.read_page(connection, listing, conveyancer_id=conveyancer_id)
    return Answer.ok(CalculationRequestPage(resources.listed(found), next_cursor))


@route("/v1/request", http_method=HttpMethod.OPTIONS, status_code=204)
async def show_methods() -> Response[None]:
    """Show the methods of the path: Litestar's own answer forgets every method but one handler's."""
    return Response(None, headers={"Allow": "GET, OPTIONS, POST"})


@get("/v1/request/{uuid:str}", before_request=admission.requires(READ))
async def retrieve_request(request: ApiRequest, uuid: FromPath[str]) -> Answer:
    """Read a request back."""
    resources = request.resources
    request_id = parse_uuid(uuid)
    if request_id is None:
        raise RequestNotFound
    async with resources.connection() as connection:
        stored = await reading.find(connection, request_id, conveyancer_id=request.user.conveyancer_id)
    return Answer.ok(resources.record(stored))


@get("/v1/questionnaire/structure", before_request=admission.requires_api_key_or_token)
async def questionnaire_structure(request: ApiRequest) -> Answer:
    """Return the questions from which a form is built, or 304 when the caller has them."""
    resources = request.resources
    etag = resources.questionnaire_etag
    # Callers keep the questions, and ask each time whether they are current.
    headers = [(b"etag", etag.encode()), (b"cache-control", b"private, no-cache")]
    if _is_current(etag, request.headers.getall("if-none-match", [])):
        return Answer(HTTPStatus.NOT_MODIFIED, headers, b"")
    return Answer.ok(resources.questionnaire, *headers)


def _is_current(etag: str, if_none_match: list[str]) -> bool:
    """Compare as RFC 9110, sections 8.8.3.2 and 13.1.2, has it for If-None-Match: weakly."""
    tag = etag.removeprefix("W/")
    return any(field.strip() == "*" or tag in _OPAQUE_TAG.findall(field) for field in if_none_match)


async def _json_body(request: ApiRequest) -> bytes:
    # It is parsed, which takes a while, only where something else stands in it.
    if request.headers.get("content-type") != MediaType.JSON and request.content_type[0] != MediaType.JSON:
        raise UnsupportedMediaType
    return await request.body()
