"""The resources that the handlers use."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from service.authentication.access_tokens import Caller, InternalReader
from service.authentication.authenticator import Authenticator
from service.calculation_requests import model
from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing
from service.calculation_requests.storing import Storage
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.pool import Connection, Pool
from service.settings import ServiceSettings


class Resources(msgspec.Struct, frozen=True):
    """The resources that the handlers use. service/app.py opens them."""

    settings: ServiceSettings
    authenticator: Authenticator
    pool: Pool
    relay: RelayWaker
    storage: Storage
    secret_keys: SecretKeyRing

    def connection(self, reader: object) -> AbstractAsyncContextManager[Connection]:
        """Acquire a connection for one HTTP request of this caller. Raises PostgresUnavailable."""
        seconds = self.settings.database_timeout_seconds
        return connections.acquired(self.pool, seconds=seconds, party=_party(reader))

    @asynccontextmanager
    async def transaction(self, reader: object) -> AsyncIterator[Connection]:
        """Open a transaction, then wake the relays. Raises PostgresUnavailable, also if a row is locked."""
        seconds, settings = self.settings.database_timeout_seconds, "SET LOCAL lock_timeout = '0.5s'"
        async with connections.transaction(
            self.pool, seconds=seconds, party=_party(reader), settings=settings
        ) as connection:
            yield connection
        self.relay.wake()

    def view(self, stored: model.CalculationRequest) -> model.CalculationRequestView:
        """Return what the API shows of a request. Raises SecretKeyMissing."""
        return stored.view_with_secret(*stored.secret_and_url(self.secret_keys, self.settings.app_url))

    def listed(self, found: Sequence[model.CalculationRequest]) -> list[model.RetrievedCalculationRequest]:
        """Return what a page shows. A request whose secret key is missing is shown without its link."""
        shown: list[model.RetrievedCalculationRequest] = []
        for stored in found:
            try:
                shown.append(self.view(stored))
            except SecretKeyMissing:
                shown.append(stored.view())
        return shown


def _party(reader: object) -> str:
    """Return the party of a caller in the pool: its firm, the internal reader, or all other callers."""
    if isinstance(reader, Caller):
        return reader.conveyancer_id
    return reader.client_id if isinstance(reader, InternalReader) else ""
