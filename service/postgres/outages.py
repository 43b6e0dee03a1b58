"""Classifies the errors of Postgres: which ones are outages, and which ones leave a session usable."""

import ssl

import asyncpg

from service.telemetry import metrics

# The errors that the server, the network or a timeout causes, never the statement.
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
    """Postgres is unreachable or too slow, or the queue for its connections is full. The API answers 503."""

    @classmethod
    def counted(cls) -> "PostgresUnavailable":
        """Return the exception, counted in `postgres_unavailable_total`."""
        metrics.postgres_unavailable.inc()
        return cls()


def is_outage(error: BaseException) -> bool:
    """Whether a retry may succeed later.

    After the ValueError for a rejected certificate it may, because the certificate may be renewed. After any
    other ValueError of asyncpg it cannot, because a bad argument or DSN stays bad.
    """
    if isinstance(error, ValueError):
        return isinstance(error, ssl.SSLCertVerificationError)
    return isinstance(error, OUTAGE_ERRORS)


def is_harmless(error: BaseException) -> bool:
    """Whether the session is known to be unchanged after this error, so that it can be used again.

    After other errors a statement may still run, a transaction may be open, or the server may be read-only.
    """
    if isinstance(error, asyncpg.PostgresError):
        # A DataError that asyncpg raises itself has no severity, and may leave a transaction open.
        return isinstance(error, _REJECTIONS) and error.severity is not None
    return isinstance(error, Exception) and not isinstance(error, (PostgresUnavailable, *OUTAGE_ERRORS))


def is_rejected_login(error: BaseException) -> bool:
    """Whether a PostgresUnavailable was raised because Postgres rejected the login."""
    return isinstance(error.__cause__, asyncpg.InvalidAuthorizationSpecificationError)
