"""The endpoints: one handler each, and what the handlers work with."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

import msgspec
import structlog
from litestar import HttpMethod, MediaType, Request, Response, asgi, get, post, route
from litestar.datastructures import State
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.params import FromPath

from service.api import admission, idempotency_key, list_query, log_facts, request_body
from service.api.admission import Admission, SecretHolder
from service.api.envelope import Answer
from service.api.errors import ApiError, method_not_allowed
from service.api.list_query import CalculationRequestPage
from service.authentication.authenticator import READ, WRITE, Caller, InternalReader
from service.calculation_requests import event_history, reading, storing
from service.calculation_requests.model import (
    CalculationRequest,
    CalculationRequestView,
    RequestNotFound,
    RetrievedCalculationRequest,
)
from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing, WrongSecret
from service.calculation_requests.storing import Storage
from service.identifiers import parse_uuid
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server import http_protocol
from service.server.asgi import Receive, Scope, Send, header_values
from service.settings import ServiceSettings
from service.telemetry import logs

LARGEST_BODY = 256 * 1024  # bytes
_QUESTIONNAIRE_METHODS = "GET, OPTIONS"
_OPAQUE_TAG = re.compile(r'"[^"]*"')  # of an ETag (RFC 9110, section 8.8.3)

User = TypeVar("User")
Found = TypeVar("Found")
FoundOwn_co = TypeVar("FoundOwn_co", covariant=True)

_log = structlog.get_logger()


class Resources(msgspec.Struct, frozen=True):
    """What the handlers work with; the lifespan opens it."""

    settings: ServiceSettings
    admission: Admission
    pool: Pool
    storage: Storage
    secret_keys: SecretKeyRing
    questionnaire: msgspec.Raw  # encoded once
    questionnaire_etag: str

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Lend a connection for the statements of one HTTP request. Raises PostgresUnavailable."""
        return loans.connection(self.pool, seconds=self.settings.database_timeout_seconds)

    def view(self, stored: CalculationRequest) -> CalculationRequestView:
        """Return what the API shows of a request. Raises SecretKeyMissing."""
        return stored.view(self.secret_keys, self.settings.app_url)

    def listed(self, found: Sequence[CalculationRequest]) -> list[RetrievedCalculationRequest]:
        """Return what a page shows. A missing key costs one request its secret, not the caller the page."""
        shown: list[RetrievedCalculationRequest] = []
        for stored in found:
            try:
                shown.append(self.view(stored))
            except SecretKeyMissing as error:
                self.secret_keys.report_missing(error)
                shown.append(stored.view_without_secret())
        return shown


class ApiRequest(Request[User, Any, State], Generic[User]):
    """An HTTP request to the API, with its caller, whom the `before_request` admitted, as `user`."""

    @property
    def resources(self) -> Resources:
        """The resources that the lifespan has opened."""
        resources: Resources = self.app.state.resources
        return resources


@post("/v1/request", status_code=200, before_request=admission.requires(WRITE))
async def create_request(request: ApiRequest[Caller]) -> Answer:
    """Store a request for a calculation; its e-mail and its calculation follow."""
    resources, conveyancer_id = request.resources, request.user.conveyancer_id
    facts = log_facts.of(request.scope)
    key = idempotency_key.parse_key(header_values(request.scope, b"idempotency-key"))
    body = request_body.parse(await _json_body(request))
    idempotency = body.idempotency(key)
    until = time.monotonic() + resources.settings.database_timeout_seconds
    waiver_applies = body.asks_for_waiver and await resources.storage.waives_fee(
        idempotency, conveyancer_id=conveyancer_id, has_valid_reason=body.reason_error is None, until=until
    )
    new = storing.new_request(
        body.validated(waiver_applies=waiver_applies),
        conveyancer_id=conveyancer_id,
        keys=resources.secret_keys,
    )
    try:
        stored, is_repeat = await resources.storage.store(
            new, idempotency=idempotency, traceparent=facts.traceparent, until=until
        )
    except (PostgresUnavailable, asyncio.CancelledError):
        facts.uuid = new.uuid  # It may be stored all the same.
        raise
    facts.uuid = stored.uuid
    headers = [(idempotency_key.REPLAYED.lower().encode(), b"true")] if is_repeat else []
    return Answer.ok(resources.view(stored), *headers)


@get("/v1/request", before_request=admission.requires(READ))
async def list_requests(request: ApiRequest[Caller]) -> Answer:
    """List the caller's requests, newest first."""
    resources = request.resources
    listing = list_query.parse_listing(request.scope["query_string"])
    conveyancer_id = request.user.conveyancer_id
    async with resources.connection() as connection:
        found, next_cursor = await reading.read_page(connection, listing, conveyancer_id=conveyancer_id)
    return Answer.ok(CalculationRequestPage(resources.listed(found), next_cursor))


@route("/v1/request", http_method=HttpMethod.OPTIONS, status_code=204)
async def show_methods() -> Response[None]:
    """Show the methods of the path: Litestar's own answer names only those of one handler."""
    return Response(None, headers={"Allow": "GET, OPTIONS, POST"})


@get("/v1/request/{uuid:str}", before_request=admission.requires_reader_or_secret)
async def retrieve_request(
    request: ApiRequest[Caller | InternalReader | SecretHolder], uuid: FromPath[str]
) -> Answer:
    """Read a request back.

    The request's own `secret`, as the Bearer token, opens it too. Then `notes`, `external_id` and `meta_data`
    are null, because they are the firm's alone. For an internal reader `secret` and `request_url` are null.
    """
    resources = request.resources
    if isinstance(request.user, SecretHolder):
        return Answer.ok(resources.view(await _find_by_secret(resources, uuid, request.user.secret)))
    stored = await _find(resources, request.user, uuid, reading.find, reading.read_internally)
    is_internal = isinstance(request.user, InternalReader)
    return Answer.ok(stored.view_without_secret() if is_internal else resources.view(stored))


async def _find_by_secret(resources: Resources, uuid: str, secret: str) -> CalculationRequest:
    request_id = parse_uuid(uuid)
    if request_id is None:  # No statement, because the form of a uuid is no secret.
        raise WrongSecret
    async with resources.connection() as connection:
        return await reading.find_by_secret(connection, request_id, secret=secret, keys=resources.secret_keys)


@get("/v1/request/{uuid:str}/events", before_request=admission.requires_reader)
async def list_events(request: ApiRequest[Caller | InternalReader], uuid: FromPath[str]) -> Answer:
    """List what has happened to a request so far: its events, oldest first."""
    history = await _find(
        request.resources, request.user, uuid, event_history.find, event_history.read_internally
    )
    return Answer.ok(history.view())


class _FindOwn(Protocol[FoundOwn_co]):
    """Finds what is stored of a request of one conveyancer."""

    def __call__(
        self, connection: Connection, request_id: UUID, *, conveyancer_id: str
    ) -> Awaitable[FoundOwn_co]: ...


async def _find(
    resources: Resources,
    reader: Caller | InternalReader,
    uuid: str,
    find: _FindOwn[Found],
    read_internally: Callable[[Connection, UUID], Awaitable[Found]],
) -> Found:
    """Return what is stored of a request that the reader may read, and log each attempt of an internal one.

    Raises RequestNotFound and UnknownConveyancer.
    """
    if isinstance(reader, Caller):
        return await _run(resources, uuid, partial(find, conveyancer_id=reader.conveyancer_id))
    is_found = False
    try:
        found = await _run(resources, uuid, read_internally)
        is_found = True
        return found
    finally:
        known = uuid if parse_uuid(uuid) else None  # Anything else may be personal data.
        _log.info(
            "request_read_internally", client_id=reader.client_id, found=is_found, **logs.about(known, None)
        )


async def _run(
    resources: Resources, uuid: str, read: Callable[[Connection, UUID], Awaitable[Found]]
) -> Found:
    """Run a read of one request on a connection of its own."""
    request_id = parse_uuid(uuid)
    if request_id is None:
        raise RequestNotFound
    async with resources.connection() as connection:
        return await read(connection, request_id)


# Not `get`: Litestar's request, hooks and answer took a tenth of the time of a questionnaire.
@asgi("/v1/questionnaire/structure", copy_scope=False)
async def questionnaire_structure(scope: Scope, receive: Receive, send: Send) -> None:
    """Return the questions from which a form is built, or 304 when the caller has them."""
    answer = await _questionnaire(scope)
    await answer(scope, receive, send)


async def _questionnaire(scope: Scope) -> Answer:
    if scope["method"] == HttpMethod.OPTIONS:
        return Answer(HTTPStatus.NO_CONTENT, [(b"allow", _QUESTIONNAIRE_METHODS.encode())], b"")
    if scope["method"] != HttpMethod.GET:
        raise method_not_allowed(_QUESTIONNAIRE_METHODS)
    resources: Resources = scope["litestar_app"].state.resources
    await resources.admission.admit_api_key_or_token(scope)
    etag = resources.questionnaire_etag
    # Callers keep the questions, and ask each time whether they are current. No `Vary`: the questions are the
    # same for every caller, and no shared cache may keep them.
    headers = [(b"etag", etag.encode()), (b"cache-control", b"private, no-cache")]
    if _is_current(etag, header_values(scope, b"if-none-match")):
        return Answer(HTTPStatus.NOT_MODIFIED, headers, b"")
    return Answer.ok(resources.questionnaire, *headers)


def _is_current(etag: str, if_none_match: list[str]) -> bool:
    """Compare weakly, as If-None-Match does (RFC 9110, sections 8.8.3.2 and 13.1.2)."""
    tag = etag.removeprefix("W/")
    return any(field.strip() == "*" or tag in _OPAQUE_TAG.findall(field) for field in if_none_match)


async def _json_body(request: ApiRequest[Caller]) -> bytes:
    check_declared(request.headers.get("content-type"), request.headers.get("content-encoding"))
    try:
        async with asyncio.timeout(http_protocol.BODY_SECONDS):
            return await request.body()
    except TimeoutError:
        raise body_overdue() from None
    except RequestEntityTooLarge:
        raise body_too_large(request.content_length) from None


def check_declared(content_type: str | None, encoding: str | None) -> None:
    """Raise ApiError unless a body is declared as JSON, and as not compressed."""
    if not content_type:
        raise _unsupported("The Content-Type header is missing: send `Content-Type: application/json`.")
    if content_type.partition(";")[0].strip().lower() != MediaType.JSON:
        raise _unsupported(
            "The Content-Type header names another type than JSON: send `Content-Type: application/json`."
        )
    if encoding is not None and encoding.lower() != "identity":
        raise _unsupported(
            "The Content-Encoding header says that the body is compressed: send it uncompressed, without it."
        )


def _unsupported(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)


def body_overdue() -> ApiError:
    """Return the refusal of a body that takes too long. It may still arrive, so the connection is closed."""
    return ApiError(
        HTTPStatus.REQUEST_TIMEOUT,
        "request_timeout",
        "The body did not arrive in time: send the request again.",
        (b"connection", b"close"),
    )


def body_too_large(size: int | None) -> ApiError:
    """Return the refusal of a body, whose size is known if the caller announced it."""
    most = f"{LARGEST_BODY // 1024} KiB"
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body_too_large",
        f"The body is larger than {most}: send less."
        if size is None
        else f"The body has {size} bytes: at most {LARGEST_BODY} ({most}) are accepted.",
    )
