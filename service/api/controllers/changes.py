"""The endpoints by which a firm changes its requests."""

import structlog
from litestar import Controller, post
from litestar.status_codes import HTTP_200_OK

from service.api.api_request import ApiRequest
from service.api.controllers.requests import Uuid, id_in
from service.api.envelope import Envelope, JSONResponse, succeed
from service.api.guards import requires
from service.api.openapi import examples
from service.api.openapi.declarations import Documented
from service.authentication.access_tokens import WRITE, Caller
from service.calculation_requests import email_changes, reading
from service.calculation_requests.changing import change
from service.calculation_requests.model import CalculationRequestView
from service.outbox.events import RequestWithdrawn

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
        resources, caller = request.resources, request.user
        request_id = id_in(uuid, caller)
        async with resources.transaction(caller) as connection:
            await reading.find(connection, request_id, conveyancer_id=caller.conveyancer_id)
            async with change(connection, request_id) as changed:
                if changed.withdrawn_at is None:
                    changed.withdrawn_at = changed.locked_at
                    changed.announce(RequestWithdrawn, traceparent=request.scope["state"]["traceparent"])
                    await email_changes.cancel(connection, {request_id: changed})
                    # Before the commit: better a line without a change than a change without a line.
                    _log.info("request_withdrawn", client_id=caller.client_id, uuid=uuid)
            stored = await reading.find(connection, request_id, conveyancer_id=caller.conveyancer_id)
            return succeed(resources.view(stored))  # before the commit, so that an error changes nothing
