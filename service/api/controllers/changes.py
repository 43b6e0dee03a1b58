"""The endpoints by which a firm changes its requests."""

from collections.abc import Awaitable, Callable
from functools import partial

import structlog
from litestar import Controller, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK

from service.api.api_request import ApiRequest
from service.api.bodies import EmailBody
from service.api.controllers.requests import Uuid, id_in
from service.api.decoding import BodyDecoder
from service.api.envelope import Envelope, JSONResponse, succeed
from service.api.guards import requires
from service.api.openapi import examples
from service.api.openapi.documenting import Documented
from service.authentication.access_tokens import WRITE, Caller
from service.calculation_requests import email_changes, model, reading
from service.calculation_requests.changing import LockedRequest, RequestLocked, change_all
from service.calculation_requests.model import CalculationRequestView
from service.outbox.events import RequestWithdrawn
from service.postgres.pool import Connection

_log = structlog.get_logger()


class Changes(Controller):
    """Changes of a request."""

    path = "/v1/request/{uuid:str}"
    response_class = JSONResponse
    tags = ("requests",)

    @post(
        "/withdrawal",
        status_code=HTTP_200_OK,
        before_request=requires(WRITE),
        security=[{"access_token": [WRITE]}],
        documented=Documented(answers={"ok": examples.RECORD}),
    )
    async def withdraw_request(
        self, request: ApiRequest[Caller], uuid: Uuid
    ) -> Envelope[CalculationRequestView]:
        """Withdraw a request for good, for example because the purchase fell through.

        The customer's link no longer opens it, and a pending e-mail is cancelled. You can still read the
        request, and its calculation is still recorded. A repeat changes nothing.
        """

        async def withdraw(connection: Connection, changed: LockedRequest) -> None:
            if changed.withdrawn_at is None:
                changed.withdrawn_at = changed.locked_at
                changed.announce(RequestWithdrawn)
                await email_changes.cancel(connection, {changed.id: changed})
                # Before the commit: better a line without a change than a change without a line.
                _log.info("request_withdrawn", client_id=request.user.client_id, uuid=uuid)

        return await _change(request, uuid, withdraw)

    @post(
        "/email",
        status_code=HTTP_200_OK,
        before_request=requires(WRITE),
        dto=BodyDecoder[EmailBody],
        security=[{"access_token": [WRITE]}],
        documented=Documented(
            answers={"ok": examples.RECORD},
            refused=b'{"customer_email": "ada", "link": "new"}',
            failures={"withdrawn": model.AlreadyWithdrawn(), "too_many": model.TooManyEmails()},
        ),
    )
    async def send_email(
        self, request: ApiRequest[Caller], uuid: Uuid, data: JSONBody[EmailBody]
    ) -> Envelope[CalculationRequestView]:
        """Send the customer the e-mail again, to another address or with a new link if you ask for it.

        With another address or a new link, the old link opens nothing any more, and a pending e-mail is
        cancelled. Otherwise a pending e-mail is left to be sent, and no other is added.
        """
        send = partial(
            email_changes.send_as_requested,
            key_id=request.resources.secret_keys.current_id,
            address=data.customer_email,
            new_link=data.new_link,
        )
        return await _change(request, uuid, send)


async def _change(
    request: ApiRequest[Caller], uuid: str, write: Callable[[Connection, LockedRequest], Awaitable[None]]
) -> Envelope[CalculationRequestView]:
    """Change a request of the caller by *write*, in a transaction. Return it as it is then.

    Raises RequestLocked instead of waiting: calls that wait, each with a connection, would delay other firms.
    """
    resources, caller = request.resources, request.user
    request_id = id_in(uuid, caller)
    async with resources.transaction(caller) as connection:
        await reading.find(connection, request_id, conveyancer_id=caller.conveyancer_id)
        async with change_all(connection, [request_id], waits=False) as found:
            if not found:  # It may also have been erased meanwhile, which a retry will find.
                raise RequestLocked
            changed = found[request_id]
            changed.client_id, changed.traceparent = caller.client_id, request.scope["state"]["traceparent"]
            await write(connection, changed)
        stored = await reading.find(connection, request_id, conveyancer_id=caller.conveyancer_id)
        return succeed(resources.view(stored))  # before the commit, so that an error changes nothing
