"""Findings of `doctor`, how its checks are run, and the checks of Postgres that both processes share."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal

import asyncpg
import msgspec

from service.calculation_requests import reading
from service.calculation_requests.request_secrets import SecretKeyRing
from service.postgres import outages, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from service.postgres.schema import SchemaOutdated
from service.settings import InvalidSetting, Settings

TIMEOUT_SECONDS = 10.0

_NOTICEABLE_SKEW = timedelta(seconds=2)
_INTOLERABLE_SKEW = timedelta(seconds=30)  # the default of AUTH_LEEWAY_SECONDS: beyond it tokens are rejected

_REASONS: Mapping[type[Exception], str] = {
    ssl.SSLError: "the TLS handshake failed",
    FileNotFoundError: "no such file",
    ConnectionRefusedError: "connection refused",
    socket.gaierror: "unknown host",
    asyncpg.InvalidAuthorizationSpecificationError: "user or password refused",
    asyncpg.InvalidCatalogNameError: "no such database",
    asyncpg.TooManyConnectionsError: "no connections left",
    TimeoutError: "no answer in time",
}


class Finding(msgspec.Struct, frozen=True):
    """The result of a check, with a hint on how to fix a problem. It contains no secret."""

    state: Literal["ok", "warn", "fail"]
    check: str
    says: str
    hint: str | None = None


Findings = Iterable[Finding]


def reason(error: BaseException) -> str:
    """Return why a server is unavailable. Addresses are left out: they may contain passwords."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {cause.verify_message}"
        for kind, words in _REASONS.items():
            if isinstance(cause, kind):
                return words
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


class Check(msgspec.Struct, frozen=True):
    """A check of a server: the variables it needs, and what its expected errors mean."""

    name: str
    needs: Collection[str]
    run: Callable[[], Awaitable[Findings]]
    expects: tuple[type[Exception], ...]
    hint: str
    reason: Callable[[Exception], str] = reason


async def diagnose(
    problems: Mapping[str, str],
    parsers: Mapping[str, Callable[[], object]],
    checks: Iterable[Check],
    *,
    timeout_seconds: float,
) -> list[Finding]:
    """Return a finding for each bad variable, and those of *checks*, which run concurrently.

    *problems* are those of `settings.examine`. *parsers* raise InvalidSetting for what the form of a
    variable does not show. Each check may take *timeout_seconds*.
    """
    found = await asyncio.gather(*(_run(check, problems, timeout_seconds) for check in checks))
    return [*_settings(problems, parsers), *(finding for findings in found for finding in findings)]


def _settings(problems: Mapping[str, str], parsers: Mapping[str, Callable[[], object]]) -> Findings:
    bad = dict(problems)
    for variable in parsers.keys() - problems.keys():
        try:
            parsers[variable]()
        except InvalidSetting as error:
            bad[variable] = str(error)
    findings = [Finding("fail", "settings", bad[variable]) for variable in sorted(bad)]
    return findings or [Finding("ok", "settings", "all variables are valid")]


async def _run(check: Check, problems: Mapping[str, str], timeout_seconds: float) -> Findings:
    if bad := sorted(problems.keys() & set(check.needs)):
        return [Finding("warn", check.name, f"not checked without {', '.join(bad)}")]
    expected: tuple[type[Exception], ...] = (TimeoutError, *check.expects)
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            return await check.run()
    except expected as error:
        if limit.expired():
            says = f"no answer within {timeout_seconds:g} s"
            return [Finding("fail", check.name, says, "is the address right?")]
        return [Finding("fail", check.name, check.reason(error), check.hint)]


def rendered(findings: Collection[Finding]) -> str:
    """Return a line for each finding."""
    width = max(len(finding.check) for finding in findings)
    return "\n".join(
        f"{finding.state:<4}  {finding.check:<{width}}  {finding.says}"
        + (f" ({finding.hint})" if finding.hint else "")
        for finding in findings
    )


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if any check has failed, else 0."""
    return int(any(finding.state == "fail" for finding in findings))


def postgres_check(settings: Settings, *, connections: int) -> Check:
    """Return the check of Postgres. *connections* is the number that all processes may open together."""

    async def run() -> Findings:
        connection = await asyncpg.connect(settings.database_url, statement_cache_size=0)
        try:
            return [
                Finding("ok", "postgres", f"version {connection.get_server_version().major}"),
                await _schema(connection),
                await _event_ids(connection),
                await _clock(connection),
                await _connections(connection, connections),
                await _secret_keys(connection, settings.request_secret_keys),
            ]
        finally:
            connection.terminate()

    needs, hint = ["DATABASE_URL", "DATABASE_POOL_SIZE"], "is DATABASE_URL right, and Postgres running?"
    return Check("postgres", needs, run, (*outages.OUTAGE_ERRORS, ValueError), hint)


async def _schema(connection: Connection) -> Finding:
    try:
        await schema.check(connection)
    except SchemaOutdated:
        says = f"older than version {schema.VERSION}"
        return Finding("fail", "schema", says, "run `python -m service schema apply`")
    except PostgresUnavailable:
        return Finding("fail", "schema", "Postgres is read-only", "does DATABASE_URL lead to a standby?")
    return Finding("ok", "schema", f"version {schema.VERSION} or later")


async def _event_ids(connection: Connection) -> Finding:
    """Check that event ids are assigned in order.

    Relays read a lane from a low-water mark on. An id that appears below the mark is published late.
    """
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
        return Finding("ok", "event ids", "assigned in the order that relays rely on")
    hint = "outbox_id_seq needs CACHE 1, and outbox its trigger outbox_number_transaction, as in schema.sql"
    return Finding("fail", "event ids", "not assigned in the order that relays rely on", hint)


async def _clock(connection: Connection) -> Finding:
    """Compare the clocks. The error is half of the round trip."""
    asked_at = datetime.now(UTC)
    there = await connection.fetchval("SELECT clock_timestamp()")
    took = datetime.now(UTC) - asked_at
    skew = abs(there - (asked_at + took / 2)) - took / 2
    says = f"{max(skew.total_seconds(), 0):.1f} s from the clock of Postgres"
    if skew < _NOTICEABLE_SKEW:
        return Finding("ok", "clock", says)
    return Finding("fail" if skew >= _INTOLERABLE_SKEW else "warn", "clock", says, "is NTP running on both?")


async def _connections(connection: Connection, needed: int) -> Finding:
    """Compare the connections that the processes may open with those that Postgres has, and has free."""
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
    says = f"needs {needed} of {row['available']}; other clients use {row['others']}"
    hint = "lower DATABASE_POOL_SIZE, run fewer processes, use a pooler, or raise max_connections"
    if needed > row["available"]:
        return Finding("fail", "connections", says, hint)
    if needed > row["available"] - row["others"]:
        return Finding("warn", "connections", says, hint)
    return Finding("ok", "connections", says)


async def _secret_keys(connection: Connection, key_ring: str) -> Finding:
    """Look for keys of stored requests that are no longer in REQUEST_SECRET_KEYS.

    A sample: reading every row would take too long, and an index would cost every create. Keys are replaced
    seldom, so rows spread over the whole time contain each of them.
    """
    try:
        keys = SecretKeyRing.parse(key_ring or "").keys
        used = await reading.sample_secret_keys(connection)
    except InvalidSetting:
        return Finding("warn", "secret keys", "not checked without REQUEST_SECRET_KEYS")
    except asyncpg.UndefinedTableError:
        return Finding("warn", "secret keys", "not checked without the schema")
    if missing := sorted(used.keys() - keys.keys()):
        says = f"REQUEST_SECRET_KEYS lacks {', '.join(missing)}, which stored requests need"
        return Finding("fail", "secret keys", says, "put it back: without it their links cannot be made")
    return Finding("ok", "secret keys", f"has every key of {sum(used.values())} sampled requests")
