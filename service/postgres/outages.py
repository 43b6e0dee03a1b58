"""How Postgres fails: errors that mean it is unavailable, and errors that leave a session usable."""

import ssl

import asyncpg

from service.telemetry import metrics

# What asyncpg raises when the server, its network or a timeout is at fault, never the statement.
OUTAGE_ERRORS = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ObjectNotInPrerequisiteStateError,  # The database accepts no connections at the moment.
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)

# Postgres rejects the statement; the session is unchanged.
_REJECTIONS = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.LockNotAvailableError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.TransactionRollbackError,
)


class PostgresUnavailable(Exception):
    """Postgres is unreachable or too slow, or the queue for its connections is full."""

    @classmethod
    def counted(cls) -> "PostgresUnavailable":
        """Return the exception, counted in `postgres_unavailable_total`."""
        metrics.postgres_unavailable.inc()
        return cls()


def is_outage(error: BaseException) -> bool:
    """Whether a retry may succeed later.

    Not with asyncpg's ValueErrors: a bad argument or DSN stays bad. The error of a refused certificate is a
    ValueError too, but the certificate may be renewed.
    """
    if isinstance(error, ValueError):
        return isinstance(error, ssl.SSLCertVerificationError)
    return isinstance(error, OUTAGE_ERRORS)


def is_harmless(error: BaseException) -> bool:
    """Whether the session is known to be as it was before this error, so that it can be connection again.

    After any other error a statement may still run, a transaction be open, or the server be read-only.
    """
    if isinstance(error, asyncpg.PostgresError):
        # asyncpg's own DataError has no severity: without a statement cache it leaves a transaction open.
        return isinstance(error, _REJECTIONS) and error.severity is not None
    return isinstance(error, Exception) and not isinstance(error, (PostgresUnavailable, *OUTAGE_ERRORS))
