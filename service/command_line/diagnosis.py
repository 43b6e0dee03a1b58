"""How the command `doctor` checks its servers, and the checks that both programs share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from service.calculation_requests import request_secrets
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import connecting
from service.command_line.answering import Answer
from service.command_line.connecting import reason
from service.postgres.pool import Connection
from service.settings import InvalidSetting

CHECK_SECONDS = 8.0  # for each server. The servers are checked concurrently.
_COMMIT_SECONDS = 2.0


class Finding(msgspec.Struct, frozen=True):
    """The result of a check, and what to do if something is wrong. It contains no secrets."""

    state: Literal["wrong", "warning", "ok"]
    check: str
    says: str
    do: str | None = None


class Check(msgspec.Struct, frozen=True):
    """A check of a server: the variables that the check needs, and what to do if it raises an exception."""

    name: str
    needs: Collection[str]
    run: Callable[[], AsyncIterator[Finding]]
    do: str


Part: TypeAlias = Callable[[Connection], AsyncIterator[Finding]]


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


async def diagnose(
    problems: Mapping[str, str], parsers: Mapping[str, Callable[[], object]], checks: Iterable[Check]
) -> list[Finding]:
    """Return a finding for each bad variable, and the findings of *checks*, which run concurrently.

    *problems* come from `settings.examine`. *parsers* look more closely at variables without a problem, and
    raise InvalidSetting.
    """
    bad = dict(problems)
    for variable in parsers.keys() - problems.keys():
        try:
            parsers[variable]()
        except InvalidSetting as error:
            bad[variable] = str(error)
    findings = [Finding("wrong", "settings", bad[variable]) for variable in sorted(bad)]
    findings = findings or [Finding("ok", "settings", "all variables are valid")]
    for found in await asyncio.gather(*(_run(check, bad.keys()) for check in checks)):
        findings += found
    return findings


async def _run(check: Check, bad: Collection[str]) -> list[Finding]:
    if missing := sorted(set(check.needs).intersection(bad)):
        return [Finding("warning", check.name, f"not checked without {', '.join(missing)}")]
    found: list[Finding] = []
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            async for finding in check.run():
                found.append(finding)  # noqa: PERF401 - findings before an error are kept
    except Exception as error:  # noqa: BLE001 - a failing check must not hide the other findings
        found.append(Finding("wrong", check.name, reason(error), check.do))
    return found


def postgres_check(database_url: str, secret_keys: str | None, *parts: Part) -> Check:
    """Return the check of Postgres. *parts* are further checks of the tables."""
    all_parts: list[Part] = [partial(_secret_keys, secret_keys), *parts]

    async def run() -> AsyncIterator[Finding]:
        async with connecting.postgres(database_url) as connection:
            yield await _write(connection)
            for part in all_parts:
                async for finding in part(connection):
                    yield finding

    return Check("postgres", ["DATABASE_URL"], run, "see PostgresUnavailable in the runbook")


async def _write(connection: Connection) -> Finding:
    """Write ten pages with the locks of a create, and roll back. Then say whether a commit ends.

    The pages show whether the disk is full, the table is locked or the server takes no writes.
    """
    writing = connection.transaction()
    await writing.start()
    await connection.execute("SET LOCAL lock_timeout = '1s'")
    await connection.execute(
        """
        INSERT INTO outbox (lane, request_id, type, sequence, payload)
        SELECT 0, gen_random_uuid(), 'doctor', 1, convert_to(repeat('x', 1500), 'UTF8')
          FROM generate_series(1, 50)
        """
    )
    await connection.execute("LOCK TABLE calculation_request IN ROW EXCLUSIVE MODE")
    await writing.rollback()
    try:
        # Postgres writes this message to its log alone, and its commit waits for a standby as any other does.
        message = "SELECT pg_logical_emit_message(true, 'doctor', '')"
        await connection.execute(message, timeout=_COMMIT_SECONDS)
    except TimeoutError:
        return Finding("wrong", "postgres", "its commits wait", "see PostgresStandbyMissing in the runbook")
    return Finding("ok", "postgres", "takes writes, has the schema")


async def _secret_keys(text: str | None, connection: Connection) -> AsyncIterator[Finding]:
    """Look for keys that were used and are now missing, and for ids that now name another key."""
    try:
        ring = SecretKeyRing.parse(text or "")
    except InvalidSetting:
        return  # The check of the settings reports this.
    used = {row["id"] for row in await connection.fetch(_USED_KEYS)}
    others = await request_secrets.find_other_keys(connection, ring)
    do = "put the right key back: without it the links that customers have are not valid"
    for key_id in others:
        yield Finding("wrong", "secret keys", f"another key than before has the id {key_id}", do)
    for key_id in sorted(used - ring.keys.keys()):
        yield Finding("wrong", "secret keys", f"stored requests need {key_id}, which is missing", do)
    if not others and used <= ring.keys.keys():
        yield Finding("ok", "secret keys", "has every key that was in use before")


_USED_KEYS = """
    SELECT id
      FROM secret_key
     UNION
    SELECT secret_key_id
      FROM (SELECT secret_key_id FROM calculation_request ORDER BY id DESC LIMIT 1000) AS newest
"""
