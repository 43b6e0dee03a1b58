"""The endpoints of calculation requests. A handler's signature and decorator are its contract."""

import asyncio
import time
from typing import Annotated
from uuid import UUID

import structlog
from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.openapi.spec import Example
from litestar.params import JSONBody, PathParameter, SkipValidation
from litestar.status_codes import HTTP_200_OK

from service.api.api_request import ApiRequest
from service.api.bodies import CreateBody
from service.api.decoding import BodyDecoder, provide_query
from service.api.envelope import Envelope, JSONResponse, succeed
from service.api.guards import SecretHolder, requires, requires_reader, requires_reader_or_secret
from service.api.idempotency_key_header import IDEMPOTENCY_KEY, REPLAYED, parse_key
from service.api.listing import CalculationRequestPage, ListQuery, cursor_of
from service.api.openapi import examples
from service.api.openapi.documenting import Documented, refusal
from service.authentication.access_tokens import READ, READ_ALL, WRITE, Caller, InternalReader
from service.calculation_requests import conveyancers, event_history, model, reading, storing
from service.calculation_requests.event_history import CalculationRequestEvents
from service.calculation_requests.request_secrets import WrongSecret
from service.identifiers import parse_uuid
from service.postgres.outages import PostgresUnavailable
from service.telemetry import logs

Uuid = Annotated[
    str,
    PathParameter(
        description="The `uuid` of the request, as create returned it.",
        examples=[Example(value=examples.UUID)],
    ),
]

_log = structlog.get_logger()


class Requests(Controller):
    """Requests for calculations: create, list, retrieve, and what has happened to one."""

    path = "/v1/request"
    response_class = JSONResponse
    tags = ("requests",)

    @post(
        status_code=HTTP_200_OK,
        before_request=requires(WRITE),
        dto=BodyDecoder[CreateBody],
        security=[{"access_token": [WRITE]}],
        documented=Documented(
            answers={"ok": examples.RECORD},
            parameters=[IDEMPOTENCY_KEY],
            refused=b'{"customer_email": "ada", "property_value": -1, "waive_fee": true}',
            headers=[REPLAYED.lower()],
            failures={
                "malformed_key": refusal(parse_key, ["a key"]),
                "two_keys": refusal(parse_key, ["one", "two"]),
                "erased": model.AlreadyErased(),
                "key_in_flight": model.IdempotencyKeyInFlight(),
                "key_reused": model.IdempotencyKeyReused(),
            },
        ),
    )
    async def create_request(
        self, request: ApiRequest[Caller], data: JSONBody[CreateBody]
    ) -> JSONResponse[Envelope[model.CalculationRequestView]]:
        """Store a request for a calculation; its e-mail and its calculation follow."""
        resources, conveyancer_id = request.resources, request.user.conveyancer_id
        state = request.scope["state"]
        key = parse_key(request.headers.getall(IDEMPOTENCY_KEY.name, []))
        until = time.monotonic() + resources.settings.database_timeout_seconds
        waiver_applies = False
        if data.calculation_fee_exempt:
            async with resources.connection(request.user) as connection:
                waiver_applies = await conveyancers.charges_calculation_fee(connection, conveyancer_id)
        new = storing.new_request(
            data.validated(waiver_applies=waiver_applies),
            conveyancer_id=conveyancer_id,
            keys=resources.secret_keys,
        )
        try:
            stored, is_repeat = await resources.storage.store(
                new, data.idempotency(key), traceparent=state.get("traceparent"), until=until
            )
        except (PostgresUnavailable, asyncio.CancelledError):
            state["uuid"] = new.uuid  # The request may have been stored nevertheless.
            raise
        state["uuid"] = stored.uuid
        return JSONResponse(
            succeed(resources.view(stored)), headers={REPLAYED: "true"} if is_repeat else None
        )

    @get(
        before_request=requires(READ),
        dependencies={"parameters": provide_query(ListQuery)},
        security=[{"access_token": [READ]}],
        documented=Documented(answers=examples.LISTED, refused=b"limit=0&cursor=next&sort=name"),
    )
    async def list_requests(
        self, request: ApiRequest[Caller], parameters: NamedDependency[SkipValidation[ListQuery]]
    ) -> Envelope[CalculationRequestPage]:
        """List the caller's requests, newest first."""
        resources, firm = request.resources, request.user.conveyancer_id
        async with resources.connection(request.user) as connection:
            page, last = await reading.read_page(
                connection, firm, parameters.filters, after=parameters.after(), limit=parameters.limit
            )
        cursor = cursor_of(last, parameters.filters)
        return succeed(CalculationRequestPage(resources.listed(page), cursor))

    @get(
        "/{uuid:str}",
        before_request=requires_reader_or_secret,
        security=[{"access_token": [READ]}, {"access_token": [READ_ALL]}, {"request_secret": []}],
        documented=Documented(answers=examples.RETRIEVED, failures={"wrong_secret": WrongSecret()}),
    )
    async def retrieve_request(
        self, request: ApiRequest[Caller | InternalReader | SecretHolder], uuid: Uuid
    ) -> Envelope[model.RetrievedCalculationRequest]:
        """Read a request back.

        The request's own `secret`, as the Bearer token, opens it too. Then `notes`, `external_id`,
        `meta_data` and `calculation_fee_exempt_reason` are null, because they are the firm's alone. For an
        internal reader `secret` and `request_url` are null.
        """
        resources, reader = request.resources, request.user
        request_id = id_in(uuid, reader)
        async with resources.connection(reader) as connection:
            if isinstance(reader, InternalReader):
                stored = await reading.read_internally(connection, request_id)
                return succeed(stored.view())
            if isinstance(reader, SecretHolder):
                stored = await reading.find_by_secret(
                    connection, request_id, secret=reader.secret, keys=resources.secret_keys
                )
            else:
                stored = await reading.find(connection, request_id, conveyancer_id=reader.conveyancer_id)
        return succeed(resources.view(stored))

    @get(
        "/{uuid:str}/events",
        before_request=requires_reader,
        security=[{"access_token": [READ]}, {"access_token": [READ_ALL]}],
        documented=Documented(answers=examples.EVENTS),
    )
    async def list_events(
        self, request: ApiRequest[Caller | InternalReader], uuid: Uuid
    ) -> Envelope[CalculationRequestEvents]:
        """List what has happened to a request so far: its events, oldest first.

        After `request.email_failed`, correct the address, or send the e-mail again.
        """
        reader = request.user
        request_id = id_in(uuid, reader)
        async with request.resources.connection(reader) as connection:
            if isinstance(reader, InternalReader):
                await reading.read_internally(connection, request_id)
            else:
                await reading.find(connection, request_id, conveyancer_id=reader.conveyancer_id)
            return succeed(await event_history.read(connection, request_id))


def id_in(uuid: str, reader: Caller | InternalReader | SecretHolder) -> UUID:
    """Return the id in a path. Raises RequestNotFound or WrongSecret if the id is malformed.

    Each call of an internal reader is logged, because internal readers may read any firm's requests.
    """
    request_id = parse_uuid(uuid)
    if isinstance(reader, InternalReader):
        known = uuid if request_id else None  # A malformed uuid may be personal data.
        _log.info("request_read_internally", client_id=reader.client_id, **logs.about(known, None))
    if request_id is None:  # No query: a quicker 401 reveals only that the uuid is malformed.
        raise WrongSecret if isinstance(reader, SecretHolder) else model.RequestNotFound
    return request_id
