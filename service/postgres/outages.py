"""Classifies the errors of Postgres: which ones are outages, and which ones leave a session usable."""

import ssl

import asyncpg

from service.telemetry import metrics

# The errors that the server, the network, a timeout or other transactions cause, never the statement.
OUTAGE_ERRORS = (
    OSError,  # and so TimeoutError
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
    asyncpg.TransactionTimeoutError,
    asyncpg.TransactionRollbackError,  # such as a deadlock
    asyncpg.UndefinedTableError,  # The schema is missing or, as with the next one, too old.
    asyncpg.UndefinedColumnError,
)


class PostgresUnavailable(Exception):
    """Postgres is unreachable or too slow, or the queue for its connections is full. The API answers 503."""

    @classmethod
    def counted(cls) -> "PostgresUnavailable":
        """Return the exception, counted in `postgres_unavailable_total`."""
        metrics.postgres_unavailable.inc()
        return cls()


def is_outage(error: BaseException) -> bool:
    """Whether a retry may succeed later. After asyncpg's ValueError for a bad argument or DSN it cannot."""
    if isinstance(error, ValueError):
        return isinstance(error, ssl.SSLCertVerificationError)  # The certificate may be renewed.
    return isinstance(error, OUTAGE_ERRORS)


def is_harmless(error: BaseException) -> bool:
    """Whether the session can be used again, because neither Postgres nor asyncpg raised the error.

    After their errors a statement may still run, a transaction may be open, or the server may be read-only.
    """
    is_theirs = isinstance(error, (PostgresUnavailable, asyncpg.PostgresError, *OUTAGE_ERRORS))
    return isinstance(error, Exception) and not is_theirs


def is_rejected_login(error: BaseException) -> bool:
    """Whether a PostgresUnavailable was raised because Postgres rejected the login."""
    return isinstance(error.__cause__, asyncpg.InvalidAuthorizationSpecificationError)
