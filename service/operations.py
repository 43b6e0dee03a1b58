"""What the document of the API says of the headers and parameters that handlers read themselves."""

from dataclasses import dataclass

from litestar.datastructures import ResponseHeader
from litestar.openapi.spec import OpenAPIType, Operation, Parameter, Schema

from service.idempotency import KEY_CHARACTERS
from service.listings import DEFAULT_LIMIT, LARGEST_LIMIT
from service.submissions import LINE_CHARACTERS

REPLAYED = ResponseHeader(
    name="Idempotent-Replayed",
    documentation_only=True,
    description="`true` when this request was stored before, with the same Idempotency-Key; else absent.",
)


@dataclass
class CreateRequest(Operation):
    """Storing a request."""

    def __post_init__(self) -> None:
        self.parameters = [
            Parameter(
                name="Idempotency-Key",
                param_in="header",
                description="Makes it safe to send a request again: the same key and body, the same request. "
                f"A string or token (RFC 8941) of at most {KEY_CHARACTERS} characters.",
                schema=Schema(type=OpenAPIType.STRING),
            )
        ]


@dataclass
class ListRequests(Operation):
    """Listing requests."""

    def __post_init__(self) -> None:
        self.parameters = [
            Parameter(
                name="external_id",
                param_in="query",
                description="Only requests with this identifier in the caller's own system.",
                schema=Schema(type=OpenAPIType.STRING, max_length=LINE_CHARACTERS),
            ),
            Parameter(
                name="limit",
                param_in="query",
                description="How many requests a page has at most.",
                schema=Schema(
                    type=OpenAPIType.INTEGER, minimum=1, maximum=LARGEST_LIMIT, default=DEFAULT_LIMIT
                ),
            ),
            Parameter(
                name="cursor",
                param_in="query",
                description="The `next_cursor` of the page before; without it, the first page.",
                schema=Schema(type=OpenAPIType.STRING),
            ),
        ]
