"""Which requests reach a handler: sheds load first, then authenticates the caller."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
from litestar import Request

from service.authentication.authenticator import Authenticator
from service.postgres.pool import Pool

AnyRequest: TypeAlias = Request[Any, Any, Any]


class Admission(msgspec.Struct, frozen=True):
    """Decides on a request before its body is read."""

    authenticator: Authenticator
    pool: Pool

    def shed_load(self) -> None:
        """Raise PostgresUnavailable while Postgres is down or too many requests wait for it.

        This comes before 401: to verify the token and read the body of a request, only to answer 503, costs
        nearly as much as to serve it.
        """
        self.pool.check_not_full()
        self.pool.check_reachable()


def requires(scope: str) -> Callable[[AnyRequest], Awaitable[None]]:
    """Return the `before_request` of an endpoint that needs Postgres, and an access token with *scope*.

    Not a guard: for each guard Litestar copies the handler at every request, which takes 15 µs.
    """

    async def admit(request: AnyRequest) -> None:
        admission: Admission = request.app.state.resources.admission
        admission.shed_load()
        request.scope["user"] = await admission.authenticator.verify_access_token(
            request.headers.getall("authorization", []), scope=scope
        )

    return admit


async def requires_api_key_or_token(request: AnyRequest) -> None:
    """Admit a caller with an API key or any access token: the `before_request` of the questionnaire.

    Access tokens need no Postgres, so the questionnaire is served while Postgres is down.
    """
    admission: Admission = request.app.state.resources.admission
    await admission.authenticator.verify_api_key_or_token(request.headers.getall("authorization", []))
