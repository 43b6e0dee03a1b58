"""The endpoints of calculation requests: one handler each."""

import asyncio
import time
from http import HTTPStatus
from uuid import UUID

import structlog
from litestar import HttpMethod, get, post, route
from litestar.params import FromPath

from service.api import admission, envelope, idempotency_key_header, json_body, list_query, request_body
from service.api.admission import SecretHolder
from service.api.list_query import CalculationRequestPage
from service.api.resources import ApiRequest, Resources
from service.authentication.access_tokens import READ, WRITE, Caller, InternalReader
from service.calculation_requests import conveyancers, event_history, reading, storing
from service.calculation_requests.model import CalculationRequest, RequestNotFound
from service.calculation_requests.request_secrets import WrongSecret
from service.identifiers import parse_uuid
from service.postgres.outages import PostgresUnavailable
from service.server.asgi import Response, header_values
from service.telemetry import logs

_log = structlog.get_logger()


@post("/v1/request", status_code=200, before_request=admission.requires(WRITE))
async def create_request(request: ApiRequest[Caller]) -> Response:
    """Store a request for a calculation; its e-mail and its calculation follow."""
    resources, conveyancer_id = request.resources, request.user.conveyancer_id
    state = request.scope["state"]
    key = idempotency_key_header.parse_key(header_values(request.scope, b"idempotency-key"))
    body = request_body.parse(await json_body.read(request))
    until = time.monotonic() + resources.settings.database_timeout_seconds
    waiver_applies = False
    if body.asks_for_waiver:
        async with resources.connection() as connection:
            waiver_applies = await conveyancers.charges_calculation_fee(connection, conveyancer_id)
    new = storing.new_request(
        body.validated(waiver_applies=waiver_applies),
        conveyancer_id=conveyancer_id,
        keys=resources.secret_keys,
    )
    try:
        stored, is_repeat = await resources.storage.store(
            new, body.idempotency(key), traceparent=state["traceparent"], until=until
        )
    except (PostgresUnavailable, asyncio.CancelledError):
        state["uuid"] = new.uuid  # The request may have been stored nevertheless.
        raise
    state["uuid"] = stored.uuid
    headers = [(idempotency_key_header.REPLAYED.lower().encode(), b"true")] if is_repeat else []
    return envelope.ok(resources.view(stored), *headers)


@get("/v1/request", before_request=admission.requires(READ))
async def list_requests(request: ApiRequest[Caller]) -> Response:
    """List the caller's requests, newest first.

    With `updated_since`, only requests that have a calculation and were changed since, oldest change first.
    After the last page, ask again with its `next_updated_since`, to miss no change.
    """
    resources = request.resources
    listing = list_query.parse_listing(request.scope["query_string"])
    conveyancer_id = request.user.conveyancer_id
    async with resources.connection() as connection:
        page = await reading.read_page(connection, listing, conveyancer_id=conveyancer_id)
    next_cursor = list_query.cursor_of(page.next)
    return envelope.ok(CalculationRequestPage(resources.listed(page.requests), next_cursor, page.horizon))


@route("/v1/request", http_method=HttpMethod.OPTIONS)
async def show_methods() -> Response:
    """Show the methods of the path, because Litestar's own response lists only one handler's methods."""
    return Response(HTTPStatus.NO_CONTENT, [(b"allow", b"GET, OPTIONS, POST")], b"")


@get("/v1/request/{uuid:str}", before_request=admission.requires_reader_or_secret)
async def retrieve_request(
    request: ApiRequest[Caller | InternalReader | SecretHolder], uuid: FromPath[str]
) -> Response:
    """Read a request back.

    The request's own `secret`, as the Bearer token, opens it too. Then `notes`, `external_id`, `meta_data`
    and `calculation_fee_exempt_reason` are null, because they are the firm's alone. For an internal reader
    `secret` and `request_url` are null.
    """
    resources, reader = request.resources, request.user
    if isinstance(reader, SecretHolder):
        return envelope.ok(resources.view(await _find_by_secret(resources, uuid, reader.secret)))
    request_id = _id_in(uuid, reader)
    async with resources.connection() as connection:
        if isinstance(reader, InternalReader):
            stored = await reading.read_internally(connection, request_id)
            return envelope.ok(stored.view(secret=None, request_url=None))
        stored = await reading.find(connection, request_id, conveyancer_id=reader.conveyancer_id)
    return envelope.ok(resources.view(stored))


async def _find_by_secret(resources: Resources, uuid: str, secret: str) -> CalculationRequest:
    request_id = parse_uuid(uuid)
    if request_id is None:  # No query: the quicker 401 reveals only that the uuid is malformed.
        raise WrongSecret
    async with resources.connection() as connection:
        return await reading.find_by_secret(connection, request_id, secret=secret, keys=resources.secret_keys)


@get("/v1/request/{uuid:str}/events", before_request=admission.requires_reader)
async def list_events(request: ApiRequest[Caller | InternalReader], uuid: FromPath[str]) -> Response:
    """List what has happened to a request so far: its events, oldest first.

    After `request.email_failed`, ask the service's operators to correct the address, or to resend the e-mail.
    """
    reader = request.user
    request_id = _id_in(uuid, reader)
    async with request.resources.connection() as connection:
        if isinstance(reader, InternalReader):
            history = await event_history.read_internally(connection, request_id)
        else:
            history = await event_history.find(connection, request_id, conveyancer_id=reader.conveyancer_id)
    return envelope.ok(history.view())


def _id_in(uuid: str, reader: Caller | InternalReader) -> UUID:
    """Return the id in a path. Raises RequestNotFound, without using Postgres, if the id is malformed.

    Each call of an internal reader is logged, because internal readers may read any firm's requests.
    """
    request_id = parse_uuid(uuid)
    if isinstance(reader, InternalReader):
        known = uuid if request_id else None  # A malformed uuid may be personal data.
        _log.info("request_read_internally", client_id=reader.client_id, **logs.about(known, None))
    if request_id is None:
        raise RequestNotFound
    return request_id
