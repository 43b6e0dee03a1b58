"""The endpoint of the feed: the events of all of a firm's requests."""

from typing import Annotated

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import SkipValidation
from msgspec import UNSET, UnsetType

from service.api.api_request import ApiRequest
from service.api.decoding import CheckedBy, Sent, parse_query, provide_query
from service.api.envelope import Envelope, JSONResponse, succeed
from service.api.errors import Failure
from service.api.guards import requires
from service.api.openapi import examples
from service.api.openapi.declarations import Documented, link, refusal
from service.authentication.access_tokens import READ, Caller
from service.calculation_requests import event_feed
from service.calculation_requests.event_feed import Cursor, CursorOutdated, EventPage

DEFAULT_LIMIT = 100


def _check_cursor(value: str) -> Failure | None:
    return (
        None
        if Cursor.parse(value)
        else ("invalid_cursor", "Expected the value of after from a page of the feed.")
    )


class FeedQuery(Sent, frozen=True, kw_only=True):
    """The parameters of the feed."""

    after: Annotated[
        str | UnsetType,
        msgspec.Meta(
            description="The `after` of the previous page. Leave it out to begin with the oldest event.",
            examples=[examples.AFTER],
            extra_json_schema={"pattern": f"^{event_feed.CURSOR}$"},
        ),
        CheckedBy(_check_cursor),
    ] = UNSET
    limit: Annotated[
        int,
        msgspec.Meta(
            ge=1,
            le=event_feed.LARGEST_LIMIT,
            description="The maximum number of events on a page. Large events make pages shorter.",
        ),
    ] = DEFAULT_LIMIT


class Events(Controller):
    """The feed."""

    path = "/v1/event"
    response_class = JSONResponse
    tags = ("requests",)

    @get(
        before_request=requires(READ),
        dependencies={"parameters": provide_query(FeedQuery)},
        security=[{"access_token": [READ]}],
        documented=Documented(
            answers=examples.FEED,
            links=link("next_page", to="read_feed", after="$response.body#/data/after"),
            failures={
                "refused_parameters": refusal(parse_query, FeedQuery, examples.REFUSED_FEED_QUERY.encode()),
                "cursor_outdated": CursorOutdated(),
            },
        ),
    )
    async def read_feed(
        self, request: ApiRequest[Caller], parameters: NamedDependency[SkipValidation[FeedQuery]]
    ) -> Envelope[EventPage]:
        """Read the events of all the caller's requests, erased ones included, oldest first.

        Store `after` in the same transaction as the events, and send it next time. While `more` is true, ask
        again at once. The same event may come again: ignore an `id` that you have stored. The events of a
        request come in order.
        """
        async with request.resources.connection(request.user) as connection:
            page = await event_feed.read_page(
                connection,
                conveyancer_id=request.user.conveyancer_id,
                after=None if parameters.after is UNSET else Cursor.parse(parameters.after),
                limit=parameters.limit,
            )
        return succeed(page)
