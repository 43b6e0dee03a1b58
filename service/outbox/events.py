"""The events that travel: CloudEvents 1.0, thin and free of personal data."""

from datetime import datetime
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import msgspec

from service import lines
from service.telemetry import trace_context

SOURCE = "/calculation-requests"
SPECVERSION = "1.0"
CONTENT_TYPE = "application/cloudevents+json"
DATA_CONTENT_TYPE = "application/json"

EXCHANGE = "calculation-requests"  # a topic exchange; the routing key is the type of the event
CALCULATIONS_EXCHANGE = "calculations"  # that of the calculation teams, likewise
NOTIFICATIONS_QUEUE = "notifications"
CALCULATION_RESULTS_QUEUE = "calculation-results"


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What every event about a calculation request says; consumers that need more ask the API."""

    type: ClassVar[str]

    uuid: Annotated[str, msgspec.Meta(description="The request: `GET /v1/request/:uuid`.")]
    tenant: Annotated[str, msgspec.Meta(description="The conveyancer that the request belongs to.")]
    request_type: str
    property_value: Annotated[int | None, msgspec.Meta(description="In pounds.")]
    calculation_fee_exempt: bool
    external_id: Annotated[str | None, msgspec.Meta(description="The conveyancer's own identifier.")]
    sequence: Annotated[
        int,
        msgspec.Meta(ge=1, description="1, 2, … within a request: shows losses and inversions."),
    ]


class RequestCreated(RequestEvent, frozen=True, kw_only=True):
    """A request was stored."""

    type: ClassVar[str] = "request.created"


class RequestEmailSent(RequestEvent, frozen=True, kw_only=True):
    """The mail server accepted the e-mail to the customer."""

    type: ClassVar[str] = "request.email_sent"


Reason = Literal["refused", "gave_up", "not_composable", "cancelled"]


class RequestEmailFailed(RequestEvent, frozen=True, kw_only=True):
    """The e-mail to the customer ended unsent: the customer has no link."""

    type: ClassVar[str] = "request.email_failed"

    reason: Annotated[
        Reason,
        msgspec.Meta(
            description="`refused`: by the mail server, for good. `gave_up`: it refused, or gave no reply, "
            "for too long. `not_composable`: the request's addresses and names make no e-mail. `cancelled`: "
            "by an operator."
        ),
    ]
    smtp_code: Annotated[int, msgspec.Meta(description="The mail server's last; 0 where it gave none.")]


class RequestCalculated(RequestEvent, frozen=True, kw_only=True):
    """The request has its calculation."""

    type: ClassVar[str] = "request.calculated"

    calculation_id: str


class CalculationCreated(msgspec.Struct, frozen=True):
    """A calculation team made a calculation from a request (inbound). Fields we do not know are ignored."""

    type: ClassVar[str] = "calculation.created"

    request_uuid: str
    calculation_id: Annotated[
        str,
        msgspec.Meta(
            min_length=1,
            max_length=255,
            pattern=r"\A[^\s\x00-\x1f\x7f-\x9f]+\Z",
            description="One word, without bidirectional controls, of which something can be seen.",
        ),
    ]

    def __post_init__(self) -> None:
        """Refuse what the pattern lets through: to narrow it would break the document that senders have."""
        if failure := lines.check_filled_line(self.calculation_id):
            raise ValueError(failure[1])


SENT = (RequestCreated, RequestEmailSent, RequestEmailFailed, RequestCalculated)
EVENT_TYPES = tuple(event.type for event in SENT)

# Someone must be listening to these: an unroutable one is a fault, not a success.
MUST_BE_ROUTED = frozenset({RequestCreated.type})

Data = TypeVar("Data")


class CloudEvent(msgspec.Struct, Generic[Data], frozen=True, kw_only=True, omit_defaults=True):
    """A CloudEvents 1.0 event in structured JSON."""

    specversion: str
    id: str
    source: str
    type: str
    subject: str | None = None
    time: datetime | None = None
    datacontenttype: str = ""
    traceparent: str | None = None
    data: Data


_encoder = msgspec.json.Encoder()


def event_id(uuid: str, event_type: str, sequence: int) -> str:
    """Return the id of an event, the same whenever it is made again: consumers deduplicate by it."""
    return f"{uuid}.{event_type}.{sequence}"


def encode(data: RequestEvent, *, time: datetime, traceparent: str | None) -> bytes:
    """Return the message body of an event."""
    return _encoder.encode(
        CloudEvent(
            specversion=SPECVERSION,
            id=event_id(data.uuid, data.type, data.sequence),
            source=SOURCE,
            type=data.type,
            subject=data.uuid,
            time=time,
            datacontenttype=DATA_CONTENT_TYPE,
            traceparent=traceparent,
            data=data,
        )
    )


class _Traced(msgspec.Struct):
    traceparent: str = ""


def trace_of(body: bytes) -> str | None:
    """Return the trace that a CloudEvent belongs to; None when it tells of none, or is none."""
    try:
        return trace_context.traceparent({"traceparent": msgspec.json.decode(body, type=_Traced).traceparent})
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
