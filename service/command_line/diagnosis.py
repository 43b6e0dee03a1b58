"""How the command `doctor` checks its servers, and the checks that both programs share."""

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from service.calculation_requests import event_history
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import connecting
from service.command_line.answering import Answer, printable
from service.command_line.connecting import reason
from service.postgres import schema
from service.postgres.connections import REPLICATE
from service.postgres.pool import Connection
from service.settings import Settings

POSTGRES_DO = "see PostgresUnavailable in the runbook"
CHECK_SECONDS = 8.0  # for each server. The servers are checked concurrently.
_COMMIT_SECONDS = 2.0
_HELD_BACK_SECONDS = 10.0


class Finding(msgspec.Struct, frozen=True):
    """The result of a check, and what to do if something is wrong. It contains no secrets."""

    state: Literal["wrong", "warning", "ok"]
    check: str
    says: str
    do: str | None = None


def answer(findings: list[Finding]) -> Answer:
    """Return the answer of the command: the findings, worst first. The status is 1 if any is wrong."""
    findings = sorted(findings, key=lambda each: ("wrong", "warning", "ok").index(each.state))
    width = max(len(finding.check) for finding in findings)
    lines = [
        f"{finding.state:<7}  {finding.check:<{width}}  {finding.says}"
        + (f"; {finding.do}" if finding.do else "")
        for finding in findings
    ]
    return Answer(findings, "\n".join(lines), status=int(findings[0].state == "wrong"))


async def check(name: str, findings: AsyncIterator[Finding], *, do: str) -> list[Finding]:
    """Return the findings of one check, the last of which says *do* if the check raises an exception."""
    found: list[Finding] = []
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            async for finding in findings:
                found.append(finding)  # noqa: PERF401 - findings before an error are kept
    except Exception as error:  # noqa: BLE001 - a failing check must not hide the other findings
        found.append(Finding("wrong", name, reason(error), do))
    return found


async def postgres(settings: Settings, ring: SecretKeyRing) -> AsyncIterator[Finding]:
    """Say whether Postgres takes writes, and whether *ring* has the keys that requests need."""
    async with connecting.postgres(settings.database_url) as connection:
        await schema.check_settings(connection)
        yield await _write(connection)
        if says := await schema.check(connection):
            yield Finding("wrong", "clock", says, "correct the wrong one: until then, nothing old is erased")
        for finding in [*await _secret_keys(connection, ring), *await _feed(connection)]:
            yield finding


async def _write(connection: Connection) -> Finding:
    """Write ten pages with the locks of a create, and roll back. Then say whether a commit ends.

    The pages show whether the disk is full, the table is locked or the server takes no writes.
    """
    writing = connection.transaction()
    await writing.start()
    await connection.execute("SET LOCAL lock_timeout = '1s'")
    await connection.execute(
        """
        INSERT INTO outbox (request_id, sequence, last_error)
        SELECT gen_random_uuid(), 1, repeat('x', 1500)
          FROM generate_series(1, 50)
        """
    )
    await connection.execute("LOCK TABLE calculation_request, event IN ROW EXCLUSIVE MODE")
    await writing.rollback()
    try:
        await connection.execute(f"SELECT {REPLICATE}", timeout=_COMMIT_SECONDS)
    except TimeoutError:
        return Finding("wrong", "postgres", "its commits wait", "see PostgresStandbyMissing in the runbook")
    return Finding("ok", "postgres", "takes writes, has the schema")


async def _secret_keys(connection: Connection, ring: SecretKeyRing) -> list[Finding]:
    """Look for missing keys. A key's id has its fingerprint, so a key that was replaced is missing, too."""
    used = {row["secret_key_id"] for row in await connection.fetch(_USED_KEYS)}
    says = [f"stored requests need {key_id}, which is missing" for key_id in sorted(used - ring.keys.keys())]
    do = "put the right key back: without it the links that customers have are not valid"
    faults = [Finding("wrong", "secret keys", each, do) for each in says]
    return faults or [Finding("ok", "secret keys", "has every key that requests need")]


# A key that was used for less than a hundredth of the time, and not lately, may be overlooked.
_USED_KEYS = """
    (SELECT secret_key_id FROM calculation_request ORDER BY id DESC LIMIT 1000)
     UNION
    SELECT secret_key_id
      FROM (SELECT min(created_at) AS oldest, max(created_at) AS newest FROM calculation_request) AS span
     CROSS JOIN generate_series(0.00, 0.99, 0.01) AS share
     CROSS JOIN LATERAL (SELECT secret_key_id
                           FROM calculation_request
                          WHERE created_at >= oldest + (newest - oldest) * share::float8
                          ORDER BY created_at
                          LIMIT 1) AS request
"""


async def _feed(connection: Connection) -> list[Finding]:
    """Name the transaction that keeps events from the firms' feeds."""
    seconds = await event_history.held_back_seconds(connection)
    holders = await connection.fetch(_HOLDER) if seconds > _HELD_BACK_SECONDS else []
    says = [f"held back for {seconds:.0f} s by {printable(row['holder'])}" for row in holders]
    return [Finding("warning", "feed", each, "see FeedHeldBack in the runbook") for each in says]


_HOLDER = """
    SELECT concat_ws(', ', 'pid ' || pid, 'application ' || application_name, 'user ' || usename,
                     'prepared transaction ' || gid, 'since ' || coalesce(xact_start, prepared)) AS holder
      FROM pg_stat_activity
      FULL JOIN pg_prepared_xacts ON transaction = backend_xid
     WHERE coalesce(backend_xid, transaction) = pg_snapshot_xmin(pg_current_snapshot())::xid
"""
