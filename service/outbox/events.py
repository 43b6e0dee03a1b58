"""The events sent and received: their names, types and encoding. CloudEvents 1.0, without personal data."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from service import text_rules
from service.identifiers import uuid_of

SOURCE = "/calculation-requests"
SPECVERSION = "1.0"
CONTENT_TYPE = "application/cloudevents+json"
DATA_CONTENT_TYPE = "application/json"

# Topic exchanges; the routing key is the type of the event.
EXCHANGE = "calculation-requests"
CALCULATIONS_EXCHANGE = "calculations"  # of the calculation teams

UUID, CALCULATION_ID = "req_01a9ZkW3mT6qPxB8vNcR4d", "calc_7Hq2"  # examples


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of every event about a calculation request."""

    # Each subclass is a type of event. How it is kept, sent and documented follows from its fields, each of
    # which has an example. The fields of these two classes are attributes of EventSource in
    # calculation_requests/model.py.
    type: ClassVar[str]

    uuid: Annotated[
        str, Meta(description="The uuid of the request, as in `GET /v1/request/:uuid`.", examples=[UUID])
    ]
    tenant: Annotated[
        str, Meta(description="The conveyancer that owns the request.", examples=["acme-conveyancing"])
    ]
    sequence: Annotated[
        int, Meta(ge=1, description="1, 2, … within a request; reveals lost and reordered events.")
    ]


class DetailedRequestEvent(RequestEvent, frozen=True, kw_only=True):
    """An event with the fields of the request that consumers need most. Those that need more call the API."""

    request_type: Annotated[str, Meta(examples=["SDLT_CALCULATION"])]
    property_value: Annotated[int | None, Meta(description="In pounds.", examples=[300_000])]
    calculation_fee_exempt: Annotated[bool, Meta(examples=[False])]
    external_id: Annotated[
        str | None,
        Meta(
            description="The conveyancer's own identifier; null once the request was erased.",
            examples=["crm-17"],
        ),
    ]


class RequestCreated(DetailedRequestEvent, frozen=True, kw_only=True):
    """A request was stored."""

    type: ClassVar[str] = "request.created"


Reason = Literal["refused", "gave_up", "not_composable", "cancelled", "bounced"]
EmailNumber = Annotated[int, Meta(ge=1, description="1, 2, … within the request's e-mails.", examples=[1])]
EmailKind = Annotated[str, Meta(description="What the e-mail is for.", examples=["invitation"])]


class RequestEmailSent(DetailedRequestEvent, frozen=True, kw_only=True):
    """The mail server accepted the e-mail to the customer."""

    type: ClassVar[str] = "request.email_sent"

    email: EmailNumber
    kind: EmailKind


class RequestEmailFailed(DetailedRequestEvent, frozen=True, kw_only=True):
    """An e-mail to the customer failed: the customer has no link, unless another e-mail has it."""

    type: ClassVar[str] = "request.email_failed"

    email: EmailNumber
    kind: EmailKind
    reason: Annotated[
        Reason,
        Meta(
            description="`refused`: by the mail server, for good. `gave_up`: the mail server refused, or did "
            "not reply, for too long. `not_composable`: no e-mail can be made from the request's addresses "
            "and names. `cancelled`: by its firm, an operator or an erasure; another e-mail may follow. "
            "`bounced`: after `request.email_sent`, a mail server reported that it cannot be delivered.",
            examples=["refused"],
        ),
    ]
    smtp_code: Annotated[
        int, Meta(description="The last reply code of a mail server; 0 if there was none.", examples=[550])
    ]


class RequestCalculated(DetailedRequestEvent, frozen=True, kw_only=True):
    """The request has its calculation."""

    type: ClassVar[str] = "request.calculated"

    calculation_id: Annotated[str, Meta(examples=[CALCULATION_ID])]


class RequestCorrected(DetailedRequestEvent, frozen=True, kw_only=True):
    """The customer's link was replaced, alone or with the address. The old link opens nothing."""

    type: ClassVar[str] = "request.corrected"

    changed: Annotated[Literal["customer_email", "link"], Meta(examples=["link"])]


class RequestWithdrawn(DetailedRequestEvent, frozen=True, kw_only=True):
    """The firm withdrew the request. Its link opens nothing, and its customer gets no e-mail."""

    type: ClassVar[str] = "request.withdrawn"


class RequestErased(RequestEvent, frozen=True, kw_only=True):
    """The request was erased. Erase what you have of it. No other event of the request follows."""

    type: ClassVar[str] = "request.erased"


class CalculationCreated(msgspec.Struct, frozen=True):
    """A calculation team made a calculation for a request. Unknown fields are ignored."""

    type: ClassVar[str] = "calculation.created"

    request_uuid: Annotated[str, Meta(examples=[UUID])]
    calculation_id: Annotated[
        str,
        Meta(
            examples=[CALCULATION_ID],
            min_length=1,
            max_length=255,
            # Only in the document: msgspec's error would not say what is wrong.
            extra_json_schema={"pattern": r"^[^\s\x00-\x1f\x7f-\x9f]+$"},
            description="No spaces, control or bidirectional characters; at least one visible character.",
        ),
    ]

    def __post_init__(self) -> None:
        """Refuse what the pattern does, and more: a line of text without a visible character."""
        if failure := text_rules.check_filled_line(self.calculation_id):
            raise ValueError(f"calculation_id: {failure.message}")
        if any(map(str.isspace, self.calculation_id)):
            raise ValueError("calculation_id: Expected one word, without spaces")


_OTHERS = [each for each in RequestEvent.__subclasses__() if each is not DetailedRequestEvent]
SENT: tuple[type[RequestEvent], ...] = (*DetailedRequestEvent.__subclasses__(), *_OTHERS)

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


def event_id(uuid: str, event_type: str, sequence: int) -> str:
    """Return the id of an event, by which consumers deduplicate. A replay makes the same id."""
    return f"{uuid}.{event_type}.{sequence}"


def headers(event_id: str, event_type: str, sequence: int, traceparent: str | None) -> dict[str, Any]:
    """Return the AMQP headers of an event. They mirror its attributes, so they can be read undecoded."""
    mirrored = {
        "cloudEvents:id": event_id,
        "cloudEvents:source": SOURCE,
        "cloudEvents:specversion": SPECVERSION,
        "cloudEvents:subject": event_id.partition(".")[0],
        "cloudEvents:type": event_type,
        "sequence": sequence,
    }
    return mirrored if traceparent is None else mirrored | {"traceparent": traceparent}


def in_envelope(row: Mapping[str, Any], traceparent: str | None = None) -> CloudEvent[Any]:
    """Return the event of a row of `event`, as it is sent. Without *traceparent*, as the API shows it."""
    uuid = uuid_of(row["request_id"])
    return CloudEvent(
        specversion=SPECVERSION,
        id=event_id(uuid, row["type"], row["sequence"]),
        source=SOURCE,
        type=row["type"],
        subject=uuid,
        time=row["time"],
        datacontenttype=DATA_CONTENT_TYPE,
        traceparent=traceparent,
        data=msgspec.Raw(row["data"]),
    )
