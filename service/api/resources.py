"""The resources that the handlers use, and how handlers access them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

import msgspec
from litestar import Request
from litestar.datastructures import State
from litestar.exceptions.http_exceptions import RequestEntityTooLarge

from service.api.decoding import body_overdue, body_too_large, malformed_body
from service.authentication.authenticator import Authenticator
from service.calculation_requests.model import (
    CalculationRequest,
    CalculationRequestView,
    RetrievedCalculationRequest,
)
from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing
from service.calculation_requests.storing import Storage
from service.outbox.lanes import RelayWaker
from service.postgres import connections
from service.postgres.pool import Connection, Pool
from service.server import limits
from service.settings import ServiceSettings

User = TypeVar("User")


class Resources(msgspec.Struct, frozen=True):
    """The resources that the handlers use. service/app.py opens them."""

    settings: ServiceSettings
    authenticator: Authenticator
    pool: Pool
    relay: RelayWaker
    storage: Storage
    secret_keys: SecretKeyRing

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """Acquire a connection for the statements of one HTTP request. Raises PostgresUnavailable."""
        return connections.Acquired(self.pool, seconds=self.settings.database_timeout_seconds)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Open a transaction for one HTTP request, for `change` to announce events. Then wake the relays."""
        seconds = self.settings.database_timeout_seconds
        async with connections.transaction(self.pool, seconds=seconds) as connection:
            yield connection
        self.relay.wake()

    def view(self, stored: CalculationRequest) -> CalculationRequestView:
        """Return what the API shows of a request. Raises SecretKeyMissing."""
        return stored.view_with_secret(*stored.secret_and_url(self.secret_keys, self.settings.app_url))

    def listed(self, found: Sequence[CalculationRequest]) -> list[RetrievedCalculationRequest]:
        """Return what a page shows. A request whose secret key is missing is shown without its link."""
        shown: list[RetrievedCalculationRequest] = []
        for stored in found:
            try:
                shown.append(self.view(stored))
            except SecretKeyMissing:
                shown.append(stored.view(secret=None, request_url=None))
        return shown


class ApiRequest(Request[User, Any, State], Generic[User]):
    """An HTTP request to the API. Its `user` is the caller that the guard admitted."""

    async def body(self) -> bytes:
        """Return the body. Raises ApiError if it is too large, empty or overdue."""
        try:
            async with asyncio.timeout(limits.BODY_SECONDS):
                body = await super().body()
        except TimeoutError:
            raise body_overdue() from None
        except RequestEntityTooLarge:
            raise body_too_large(self.content_length) from None
        if not body:  # Litestar would not ask the decoder.
            raise malformed_body("it is empty")
        return body
