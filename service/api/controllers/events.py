"""The feed: the events of all of a firm's requests."""

import re
from typing import Annotated

from litestar import get
from litestar.di import NamedDependency
from litestar.params import SkipValidation
from msgspec import UNSET, Meta, UnsetType

from service.api.api_request import ApiRequest
from service.api.decoding import Sent, provide_query
from service.api.envelope import Envelope, JSONResponse, succeed
from service.api.errors import Failure
from service.api.guards import requires
from service.api.openapi import examples
from service.api.openapi.documenting import Documented
from service.authentication.access_tokens import READ, Caller
from service.calculation_requests import event_history
from service.calculation_requests.event_history import CursorOutdated, EventPage

DEFAULT_LIMIT = 100
LARGEST_LIMIT = 500
_OTHER_CURSOR: Failure = ("invalid_cursor", "Expected the value of after from a page of the feed.")


class FeedQuery(Sent, frozen=True, kw_only=True):
    """The parameters of the feed."""

    after: Annotated[
        str | UnsetType,
        Meta(
            description="The `after` of the previous page. Leave it out to begin with the oldest event.",
            examples=[examples.AFTER],
            extra_json_schema={"pattern": f"^{event_history.CURSOR}$"},
        ),
        lambda after: None if re.fullmatch(event_history.CURSOR, after) else _OTHER_CURSOR,
    ] = UNSET
    limit: Annotated[int, Meta(ge=1, le=LARGEST_LIMIT, description="The most on a page.")] = DEFAULT_LIMIT


@get(
    "/v1/event",
    before_request=requires(READ),
    dependencies={"parameters": provide_query(FeedQuery)},
    response_class=JSONResponse,
    tags=["requests"],
    security=[{"access_token": [READ]}],
    documented=Documented(
        answers=examples.FEED,
        refused=b"after=2026-03-02T09:30:00Z&limit=501",
        failures={"cursor_outdated": CursorOutdated()},
    ),
)
async def read_feed(
    request: ApiRequest[Caller], parameters: NamedDependency[SkipValidation[FeedQuery]]
) -> Envelope[EventPage]:
    """List the events of all the caller's requests, erased ones included, oldest first.

    Store `after` with the events, in one transaction, and send it for the next page: at once if `more` is
    true, otherwise after a pause, such as a minute. An event may come again: drop an `id` that you have.
    After 410 `cursor_outdated`, keep the events, and begin again without `after`.
    """
    after, firm = parameters.after or "", request.user.conveyancer_id
    async with request.resources.connection(request.user) as connection:
        return succeed(await event_history.read_feed(connection, firm, after=after, limit=parameters.limit))
