"""Whether the settings are right, and whether everything is there that they lead to."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal

import asyncpg
import httpx
import msgspec

from service import settings
from service.authentication.signing_keys import SigningKeysUnavailable, open_signing_keys
from service.calculation_requests import reading
from service.calculation_requests.request_secrets import SecretKeyRing
from service.postgres import outages, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from service.postgres.schema import SchemaOutdated
from service.settings import InvalidSetting, ServiceSettings, Settings

TIMEOUT_SECONDS = 10.0

_NOTICEABLE_SKEW = timedelta(seconds=2)
_INTOLERABLE_SKEW = timedelta(seconds=30)  # as AUTH_LEEWAY_SECONDS: what is later is not believed

_REASONS: Mapping[type[Exception], str] = {
    ssl.SSLError: "it does not speak TLS, or not as we do",
    FileNotFoundError: "there is no such file",
    ConnectionRefusedError: "nothing listens there",
    socket.gaierror: "the name of its host is not known",
    asyncpg.InvalidAuthorizationSpecificationError: "the user or the password is refused",
    asyncpg.InvalidCatalogNameError: "there is no such database",
    asyncpg.TooManyConnectionsError: "it has no connection left",
    TimeoutError: "no answer in time",
}


class Finding(msgspec.Struct, frozen=True):
    """What was looked at, how it is and, if it is not well, what to do; no secret is in it."""

    state: Literal["ok", "warn", "fail"]
    check: str
    says: str
    hint: str | None = None


Findings = Iterable[Finding]


class Check(msgspec.Struct, frozen=True):
    """A check, and the variables without which it cannot be done."""

    name: str
    variables: Collection[str]
    run: Callable[[], Awaitable[Findings]]


async def examine_service(
    environment: Mapping[str, str], *, processes: int, timeout_seconds: float
) -> list[Finding]:
    """Check what the API needs; *processes* is the number of those that share Postgres."""
    read, problems = settings.examine(ServiceSettings, environment)
    checks = (
        postgres_check(read, connections=processes * read.database_connections),
        Check("signing keys", ["AUTH_JWKS_URL", "AUTH_JWKS_TIMEOUT_SECONDS"], lambda: signing_keys(read)),
    )
    found = settings_findings(
        problems, {"REQUEST_SECRET_KEYS": lambda: SecretKeyRing.parse(read.request_secret_keys)}
    )
    return [*found, *await examine(checks, problems, timeout_seconds=timeout_seconds)]


async def examine(
    checks: Iterable[Check], problems: Mapping[str, str], *, timeout_seconds: float
) -> list[Finding]:
    """Run *checks* side by side, each for at most *timeout_seconds*, and return what they found in order."""
    found = await asyncio.gather(*(_bounded(check, problems, timeout_seconds) for check in checks))
    return [finding for findings in found for finding in findings]


async def _bounded(check: Check, problems: Mapping[str, str], timeout_seconds: float) -> Findings:
    if bad := sorted(problems.keys() & set(check.variables)):
        return [Finding("warn", check.name, f"not checked without {', '.join(bad)}")]
    try:
        async with asyncio.timeout(timeout_seconds):
            return await check.run()
    except TimeoutError:
        return [
            Finding("fail", check.name, f"no answer within {timeout_seconds:g} s", "is the address right?")
        ]


def settings_findings(problems: Mapping[str, str], parsers: Mapping[str, Callable[[], object]]) -> Findings:
    """Name every bad variable. *parsers* raise InvalidSetting on what is more than a matter of form."""
    wrong = dict(problems)
    for variable in parsers.keys() - problems.keys():
        try:
            parsers[variable]()
        except InvalidSetting as error:
            wrong[variable] = str(error)
    return [Finding("fail", "settings", wrong[variable]) for variable in sorted(wrong)] or [
        Finding("ok", "settings", "every variable can be used")
    ]


def postgres_check(read: Settings, *, connections: int) -> Check:
    """Return the check of Postgres, schema and clock, and of whether it has so many *connections* for us."""

    async def run() -> Findings:
        try:
            connection = await asyncpg.connect(read.database_url, statement_cache_size=0)
            try:
                return [
                    Finding("ok", "postgres", f"version {connection.get_server_version().major}"),
                    await _schema(connection),
                    await _event_ids(connection),
                    await _clock(connection),
                    await _connections(connection, connections),
                    await _secret_keys(connection, read.request_secret_keys),
                ]
            finally:
                connection.terminate()
        except (*outages.OUTAGE_ERRORS, ValueError) as error:
            hint = "is DATABASE_URL right, and Postgres running?"
            return [Finding("fail", "postgres", reason(error), hint)]

    return Check("postgres", ["DATABASE_URL", "DATABASE_POOL_SIZE"], run)


async def _schema(connection: Connection) -> Finding:
    try:
        await schema.check(connection)
    except SchemaOutdated:
        return Finding(
            "fail",
            "schema",
            f"older than version {schema.VERSION}",
            "run `python -m service schema apply`",
        )
    except PostgresUnavailable:
        return Finding("fail", "schema", "Postgres takes no writes", "does DATABASE_URL lead to a standby?")
    return Finding("ok", "schema", f"version {schema.VERSION} or later")


async def _event_ids(connection: Connection) -> Finding:
    """Look for settings with which an event may appear behind the place where relays read, and be late."""
    in_order: bool = await connection.fetchval(
        """
        SELECT EXISTS (SELECT
                         FROM pg_sequence
                        WHERE seqrelid = to_regclass('outbox_id_seq')
                          AND seqcache = 1)
           AND EXISTS (SELECT
                         FROM pg_trigger
                        WHERE tgrelid = to_regclass('outbox')
                          AND tgname = 'outbox_number_transaction'
                          AND tgenabled IN ('O', 'A'))
        """
    )
    if in_order:
        return Finding("ok", "event ids", "given out in the order that relays rely on")
    hint = "outbox_id_seq needs CACHE 1, and outbox its trigger outbox_number_transaction, as in schema.sql"
    return Finding("fail", "event ids", "not given out in the order that relays rely on", hint)


async def _clock(connection: Connection) -> Finding:
    """Compare the clocks; half of the time that the question took is the error of the answer."""
    asked_at = datetime.now(UTC)
    there = await connection.fetchval("SELECT clock_timestamp()")
    took = datetime.now(UTC) - asked_at
    skew = abs(there - (asked_at + took / 2)) - took / 2
    says = f"{max(skew.total_seconds(), 0):.1f} s from that of Postgres"
    if skew < _NOTICEABLE_SKEW:
        return Finding("ok", "clock", says)
    return Finding("fail" if skew >= _INTOLERABLE_SKEW else "warn", "clock", says, "is NTP running on both?")


async def _connections(connection: Connection, needed: int) -> Finding:
    """Compare the connections that we may open with those that there are for us, and with those in use."""
    [row] = await connection.fetch(
        """
        SELECT least(
                   current_setting('max_connections')::integer
                   - current_setting('superuser_reserved_connections')::integer
                   - coalesce(current_setting('reserved_connections', true), '0')::integer,
                   nullif(database.datconnlimit, -1),
                   nullif(role.rolconnlimit, -1)
               ) AS available,
               (
                   SELECT count(*)
                     FROM pg_stat_activity
                    WHERE datid IS NOT NULL
                      AND pid <> pg_backend_pid()
                      AND application_name NOT LIKE 'calculation-requests%'
               ) AS others
          FROM pg_database AS database, pg_roles AS role
         WHERE database.datname = current_database()
           AND role.rolname = current_user
        """
    )
    says = f"{needed} for us of {row['available']}, {row['others']} in use by others"
    hint = "a smaller DATABASE_POOL_SIZE, fewer processes, a pooler, or a larger max_connections"
    if needed > row["available"]:
        return Finding("fail", "connections", says, hint)
    if needed > row["available"] - row["others"]:
        return Finding("warn", "connections", says, hint)
    return Finding("ok", "connections", says)


async def _secret_keys(connection: Connection, ring: str) -> Finding:
    """Look for keys that requests were made with, and that have left the ring.

    Every row would take too long, and an index would be written by every create. A key is replaced seldom, so
    rows from the whole time that there have been requests show it.
    """
    try:
        keys = SecretKeyRing.parse(ring or "").keys
        used = await reading.sample_secret_keys(connection)
    except InvalidSetting:
        return Finding("warn", "secret keys", "not checked without REQUEST_SECRET_KEYS")
    except asyncpg.UndefinedTableError:
        return Finding("warn", "secret keys", "not checked without the schema")
    if missing := sorted(used.keys() - keys.keys()):
        says = f"REQUEST_SECRET_KEYS lacks {', '.join(missing)}, which made the secrets of requests"
        return Finding("fail", "secret keys", says, "put it back: their links cannot be made without")
    return Finding("ok", "secret keys", f"all there that {sum(used.values())} requests were made with")


async def signing_keys(read: ServiceSettings) -> Findings:
    """Fetch the issuer's keys as the API does."""
    try:
        await open_signing_keys(read).refresh()
    except SigningKeysUnavailable as error:
        says = reason(error.__cause__ or error)
        return [Finding("fail", "signing keys", says, "what does AUTH_JWKS_URL answer?")]
    return [Finding("ok", "signing keys", "fetched, and at least one can be used")]


def reason(error: BaseException) -> str:
    """Return why a server cannot be had: what *error* came of. Addresses are left out: of passwords."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {cause.verify_message}"
        if isinstance(cause, httpx.HTTPStatusError):
            return f"HTTP status {cause.response.status_code}"
        for kind, words in _REASONS.items():
            if isinstance(cause, kind):
                return words
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


def rendered(findings: Collection[Finding]) -> str:
    """Return a line for each finding."""
    width = max(len(finding.check) for finding in findings)
    return "\n".join(
        f"{finding.state:<4}  {finding.check:<{width}}  {finding.says}"
        + (f" ({finding.hint})" if finding.hint else "")
        for finding in findings
    )


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing has failed."""
    return all(finding.state != "fail" for finding in findings)
