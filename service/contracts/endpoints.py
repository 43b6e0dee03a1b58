"""The endpoints as the OpenAPI document shows them: their examples and failures."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar.exceptions import ClientException
from litestar.handlers import HTTPRouteHandler
from msgspec.structs import replace

from service.api import decoding, idempotency_key_header, listing, questionnaire
from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.errors import ApiError
from service.api.guards import bearer_token
from service.api.listing import CalculationRequestPage
from service.api.questionnaire import QuestionnaireStructure
from service.api.requests import Requests
from service.authentication.access_tokens import READ, READ_ALL, WRITE, InvalidCredentials
from service.authentication.authenticator import InsufficientScope
from service.authentication.signing_keys import SigningKeysUnavailable
from service.calculation_requests.conveyancers import UnknownConveyancer
from service.calculation_requests.event_history import CalculationRequestEvents
from service.calculation_requests.model import (
    CalculationRequestView,
    IdempotencyKeyInFlight,
    IdempotencyKeyReused,
    RequestErased,
    RequestNotFound,
    RetrievedCalculationRequest,
)
from service.calculation_requests.request_secrets import SecretKeyMissing, WrongSecret
from service.contracts import asyncapi
from service.contracts.parameters import EXAMPLE_UUID
from service.outbox.events import RequestEmailFailed, in_envelope
from service.postgres.outages import PostgresUnavailable

_BODY = msgspec.json.schema_components([CreateBody])[1][CreateBody.__name__]
# Made of the examples in field_docs.py.
FULL_REQUEST: dict[str, Any] = {name: field["examples"][0] for name, field in _BODY["properties"].items()}
SMALLEST_REQUEST: dict[str, Any] = {name: FULL_REQUEST[name] for name in _BODY["required"]}
REFUSED_REQUEST = '{"customer_email": "ada", "property_value": -1, "waive_fee": true}'
MALFORMED_REQUEST = '{"customer_email": "ada@customer.example.com",}'
LARGE_REQUEST = 300_000  # bytes
REFUSED_QUERY = "limit=0&cursor=next&sort=name"
RECORD = CalculationRequestView(
    **FULL_REQUEST,
    uuid=EXAMPLE_UUID,
    created_at=datetime(2026, 3, 2, 9, 30, tzinfo=UTC),
    updated_at=datetime(2026, 3, 2, 9, 30, tzinfo=UTC),
    calculation_id=None,
    secret="3q2-7wAAbmV2ZXIgYSByZWFsIHNlY3JldCBoZXJlISE",  # noqa: S106 - an example
    request_url="https://app.example.com/calculator/request/req_01a9ZkW3mT6qPxB8vNcR4d"
    "?secret=3q2-7wAAbmV2ZXIgYSByZWFsIHNlY3JldCBoZXJlISE",
)
_RETRIEVED = RetrievedCalculationRequest(**msgspec.structs.asdict(RECORD))
_CALCULATED = replace(RECORD, calculation_id="calc-1", updated_at=datetime(2026, 3, 2, 9, 45, tzinfo=UTC))


def _refusal(check: Callable[..., object], *arguments: object) -> ApiError:
    """Return the error that *check* raises."""
    try:
        check(*arguments)
    except ApiError as error:
        return error
    raise ValueError(check)


# The failures that every operation can have, by the names of their examples.
ANY_FAILURE: Mapping[str, Exception] = {
    "bad_host": ClientException(),
    "two_tokens": _refusal(bearer_token, ["Bearer one", "Bearer two"]),
    "no_token": _refusal(bearer_token, []),
    "not_bearer": _refusal(bearer_token, ["Basic YTpi"]),
    "expired_token": InvalidCredentials("The access token has expired: request a new one."),
    "unforeseen": Exception(),
    "database_unavailable": PostgresUnavailable(),
    "signing_keys_unavailable": SigningKeysUnavailable(),
}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What the document says about an endpoint, beyond what its handler says."""

    handler: HTTPRouteHandler  # with one path
    tag: str
    security: list[dict[str, list[str]]]
    examples: Mapping[str, msgspec.Struct]  # payloads by name, all of the same type as "ok"
    failures: Mapping[str, Exception]  # by the names of their examples, in addition to ANY_FAILURE
    parameters: tuple[str, ...] = ()  # names in PARAMETERS
    headers: Mapping[str, bool] = {}  # of successful answers, by names in HEADERS; True if always sent
    bodies: Mapping[str, Any] = {}  # example bodies by name; only POST has any
    links: Mapping[str, Any] = {}

    @property
    def payload(self) -> type[msgspec.Struct]:
        """The type of the payload of an answer."""
        return type(self.examples["ok"])


def _link(name: str, *, to: str, **parameters: str) -> dict[str, Any]:
    """Return a link to another operation, whose parameters are taken from the answer."""
    return {name: {"operationId": to, "parameters": parameters}}


OPERATIONS = (
    Operation(
        handler=Requests.create_request,
        tag="requests",
        security=[{"access_token": [WRITE]}],
        parameters=("Idempotency-Key",),
        headers={idempotency_key_header.REPLAYED: False},
        bodies={"smallest": SMALLEST_REQUEST, "full": FULL_REQUEST},
        examples={"ok": RECORD},
        links=_link("retrieve", to="retrieve_request", uuid="$response.body#/data/uuid")
        | _link("events", to="list_events", uuid="$response.body#/data/uuid"),
        failures={
            "malformed": _refusal(parse, CreateBody, MALFORMED_REQUEST.encode()),
            "malformed_key": _refusal(idempotency_key_header.parse_key, "a key"),
            "two_keys": _refusal(idempotency_key_header.parse_key, "one", ["one", "two"]),
            "insufficient_scope": InsufficientScope(WRITE),
            "unknown_conveyancer": UnknownConveyancer(),
            "erased": RequestErased(),
            "too_slow": decoding.body_overdue(),
            "too_large": decoding.body_too_large(LARGE_REQUEST),
            "no_content_type": _refusal(decoding.check_declared, None, None),
            "not_json": _refusal(decoding.check_declared, "text/plain", None),
            "compressed": _refusal(decoding.check_declared, "application/json", "gzip"),
            "key_in_flight": IdempotencyKeyInFlight(),
            "key_reused": IdempotencyKeyReused(),
            "secret_key_missing": SecretKeyMissing(),
            "refused_fields": _refusal(parse, CreateBody, REFUSED_REQUEST.encode()),
        },
    ),
    Operation(
        handler=Requests.list_requests,
        tag="requests",
        security=[{"access_token": [READ]}],
        parameters=("external_id", "updated_since", "limit", "cursor"),
        examples={
            "ok": CalculationRequestPage([RECORD], RECORD.uuid, None),
            "last_changes": CalculationRequestPage([_CALCULATED], None, datetime(2026, 3, 2, 10, tzinfo=UTC)),
        },
        links=_link(
            "next_page",
            to="list_requests",
            cursor="$response.body#/data/next_cursor",
            updated_since="$request.query.updated_since",
        )
        | _link(
            "later_changes",
            to="list_requests",
            updated_since="$response.body#/data/next_updated_since",
        ),
        failures={
            "insufficient_scope": InsufficientScope(READ),
            "unknown_conveyancer": UnknownConveyancer(),
            "refused_parameters": _refusal(listing.read_listing, REFUSED_QUERY.encode()),
        },
    ),
    Operation(
        handler=Requests.retrieve_request,
        tag="requests",
        security=[{"access_token": [READ]}, {"access_token": [READ_ALL]}, {"request_secret": []}],
        parameters=("uuid",),
        examples={
            "ok": _RETRIEVED,
            "by_secret": replace(
                _RETRIEVED, notes=None, external_id=None, meta_data=None, calculation_fee_exempt_reason=None
            ),
            "internal_reader": replace(_RETRIEVED, secret=None, request_url=None),
        },
        links=_link("events", to="list_events", uuid="$response.body#/data/uuid"),
        failures={
            "wrong_secret": WrongSecret(),
            "insufficient_scope": InsufficientScope(READ),
            "unknown_conveyancer": UnknownConveyancer(),
            "unknown_uuid": RequestNotFound(),
            "erased": RequestErased(),
            "secret_key_missing": SecretKeyMissing(),
        },
    ),
    Operation(
        handler=Requests.list_events,
        tag="requests",
        security=[{"access_token": [READ]}, {"access_token": [READ_ALL]}],
        parameters=("uuid",),
        examples={
            "ok": CalculationRequestEvents(
                [
                    in_envelope(event, time=asyncapi.EXAMPLE_TIME, traceparent=None)
                    for event in asyncapi.SENT_EXAMPLES
                    if not isinstance(event, RequestEmailFailed)
                ]
            )
        },
        failures={
            "insufficient_scope": InsufficientScope(READ),
            "unknown_conveyancer": UnknownConveyancer(),
            "unknown_uuid": RequestNotFound(),
            "erased": RequestErased(),
        },
    ),
    Operation(
        handler=questionnaire.questionnaire_structure,
        tag="questionnaire",
        security=[{"api_key": []}, {"access_token": []}],
        parameters=("If-None-Match",),
        headers={"ETag": True, "Cache-Control": True},
        examples={"ok": QuestionnaireStructure(questionnaire.load().questionnaire[:4])},
        failures={},
    ),
)
