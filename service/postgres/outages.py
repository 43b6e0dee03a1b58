"""Every way in which Postgres can be unavailable, under one name."""

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from service.telemetry import metrics

# What asyncpg raises when the server, its network or the time allowed is at fault, never the statement.
UNAVAILABLE = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ObjectNotInPrerequisiteStateError,  # a database that admits no connections for now
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)

# With these Postgres refuses a statement, and nothing else of the session has changed.
_REFUSALS = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.LockNotAvailableError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.TransactionRollbackError,
)


class PostgresUnavailable(Exception):
    """Postgres did not answer in time."""


def unavailable() -> PostgresUnavailable:
    """Return the exception, counted."""
    metrics.postgres_unavailable.inc()
    return PostgresUnavailable()


def means_unavailable(error: BaseException | None) -> bool:
    """Whether waiting may mend it. It does not mend a bad argument or DSN: asyncpg's ValueErrors."""
    return isinstance(error, UNAVAILABLE) and not isinstance(error, ValueError)


def is_harmless(error: BaseException | None) -> bool:
    """Whether a session is known to be as it was before this error, and so may be lent again.

    After any other, a statement may be under way, a transaction open, or the server one that takes no writes.
    """
    if isinstance(error, asyncpg.PostgresError):
        # asyncpg's own DataError has no severity: where it keeps no statements, it has begun a transaction.
        return isinstance(error, _REFUSALS) and error.severity is not None
    return error is None or (
        isinstance(error, Exception) and not isinstance(error, (PostgresUnavailable, *UNAVAILABLE))
    )


@contextmanager
def unavailability() -> Iterator[None]:
    """Raise PostgresUnavailable in place of whatever asyncpg says when the server is away."""
    try:
        yield
    except UNAVAILABLE as error:
        if not means_unavailable(error):
            raise
        raise unavailable() from error
