"""How the checks of the command `doctor` run, and the checks that both processes share."""

import asyncio
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qs, urlsplit

import asyncpg
import click
import msgspec

from service.calculation_requests import request_secrets
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line.answering import Answer, show
from service.postgres import schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from service.postgres.schema import SchemaOutdated
from service.settings import InvalidSetting

CHECK_SECONDS = 8.0  # for all checks, which run concurrently: the command then takes less than ten seconds
APP_SECONDS = 5.0
_COMMIT_SECONDS = 2.0
WATCH_SECONDS = 5.0
ASK_POSTGRES = "is DATABASE_URL right, and Postgres well?"

# What is wrong, by class of error. The text may contain the error, as `{0}`.
Reasons: TypeAlias = Mapping[type[BaseException], str]
_REASONS: Reasons = {
    ssl.SSLCertVerificationError: "its certificate is not accepted: {0.verify_message}",
    ssl.SSLError: "the TLS handshake failed",
    FileNotFoundError: "no such file",
    ConnectionRefusedError: "connection refused",
    socket.gaierror: "unknown host",
    TimeoutError: "no answer in time",
    asyncpg.InvalidAuthorizationSpecificationError: "user or password refused",
    asyncpg.InvalidCatalogNameError: "no such database",
    asyncpg.TooManyConnectionsError: "no connections left",
    asyncpg.DiskFullError: "its disk is full",
    asyncpg.InsufficientPrivilegeError: "its user lacks a right: {0.args[0]}",
    SchemaOutdated: "its schema is too old, or there is none, or it gives this user no rights: "
    "run `python -m service schema apply` as its owner",
    PostgresUnavailable: "it takes no writes: it is a standby, or default_transaction_read_only is on",
    asyncpg.LockNotAvailableError: "another session has locked its tables: pg_stat_activity shows which",
}


class Finding(msgspec.Struct, frozen=True):
    """The result of a check, and what to do if something is wrong. It contains no secrets."""

    state: Literal["wrong", "warning", "ok"]
    check: str
    says: str
    do: str | None = None


class Check(msgspec.Struct, frozen=True):
    """A check of a server: the variables that the check needs, and what to do if the check fails."""

    name: str
    needs: Collection[str]
    run: Callable[[], AsyncIterator[Finding]]
    do: str
    reasons: Reasons = {}


async def answer(examine: Callable[[], Awaitable[list[Finding]]], *, watch: bool) -> Answer:
    """Return the findings of *examine*, worst first. With *watch*, print them every few seconds instead."""
    asyncio.get_running_loop().set_default_executor(_DaemonThreads())
    while True:
        findings = sorted(await examine(), key=lambda each: ("wrong", "warning", "ok").index(each.state))
        width = max(len(finding.check) for finding in findings)
        lines = [
            f"{finding.state:<7}  {finding.check:<{width}}  {finding.says}"
            + (f"; {finding.do}" if finding.do else "")
            for finding in findings
        ]
        found = Answer(findings, "\n".join(lines), status=int(findings[0].state == "wrong"))
        if not watch:
            return found
        click.clear()
        show(found, as_json=False)
        await asyncio.sleep(WATCH_SECONDS)


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
    running: dict[asyncio.Task[None], tuple[Check, list[Finding]]] = {}
    for check in checks:
        found: list[Finding] = []
        running[asyncio.create_task(_run(check, bad.keys(), found))] = check, found
    _, late = await asyncio.wait(running, timeout=CHECK_SECONDS)
    for task, (check, found) in running.items():
        findings += found
        if task in late:
            task.cancel()  # and not awaited: aiormq may then wait half a minute for the end of TLS
            findings.append(Finding("wrong", check.name, _REASONS[TimeoutError], check.do))
    return findings


async def _run(check: Check, bad: Collection[str], found: list[Finding]) -> None:
    if missing := sorted(set(check.needs).intersection(bad)):
        found.append(Finding("warning", check.name, f"not checked without {', '.join(missing)}"))
        return
    try:
        async for finding in check.run():
            found.append(finding)  # noqa: PERF401 - findings before an error are kept
    except Exception as error:  # noqa: BLE001 - a failing check must not hide the other findings
        found.append(Finding("wrong", check.name, reason(error, check.reasons), check.do))


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call in a thread that neither asyncio nor Python waits for at the end.

    A look-up of a name cannot be interrupted, and waits half a minute for name servers that are silent.
    """

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:  # noqa: ANN401
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*arguments, **named))
                except BaseException as error:  # noqa: BLE001 - as in ThreadPoolExecutor
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future


def reason(error: BaseException, reasons: Reasons) -> str:
    """Return why a server is unavailable, without addresses, because they may contain passwords."""
    cause: BaseException | None = error
    while cause is not None:
        for kind, words in {**reasons, **_REASONS}.items():
            if isinstance(cause, kind):
                return words.format(cause)
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


Part = Callable[[Connection], AsyncIterator[Finding]]


def postgres_check(
    database_url: str, secret_keys: str | None, *parts: Part, listen_url: str | None = None
) -> Check:
    """Return the check of Postgres. *parts* are further checks of the tables, such as the worker's."""
    is_verified = all(_verifies(url) for url in (database_url, listen_url) if url)

    async def run() -> AsyncIterator[Finding]:
        connection = await asyncpg.connect(database_url, statement_cache_size=0)
        try:
            yield await _written(connection, "postgres", is_verified=is_verified)
            for part in (_secret_keys(secret_keys), *parts):
                async for finding in part(connection):
                    yield finding
        finally:
            connection.terminate()

    return Check("postgres", ["DATABASE_URL"], run, ASK_POSTGRES)


def pooler_checks(url: str | None) -> list[Check]:
    """Return the check of the pooler that the processes use, if *url* leads to it."""

    async def run() -> AsyncIterator[Finding]:
        connection = await asyncpg.connect(url, statement_cache_size=0)
        try:
            yield await _written(connection, "pooler", is_verified=_verifies(url or ""))
        finally:
            connection.terminate()

    return [Check("pooler", [], run, "callers get 503 if the API cannot use it either")] if url else []


_VERIFY_POSTGRES = "put `sslmode=verify-full` into DATABASE_URL and LISTEN_DATABASE_URL"


def _verifies(url: str) -> bool:
    """Whether asyncpg checks the server's certificate and name, unless the server is on this machine.

    `sslmode=require` checks the certificate only if there is a file of authorities, and never the name.
    """
    return parse_qs(urlsplit(url).query).get("sslmode") == ["verify-full"] or is_on_this_machine(url)


def is_on_this_machine(url: str) -> bool:
    """Whether a server's URL names the loopback interface or a Unix socket, where TLS protects nothing."""
    parts = urlsplit(url)
    host = parse_qs(parts.query).get("host", [parts.hostname or ""])[0]
    return host in {"", "localhost", "127.0.0.1", "::1"} or host.startswith("/")


def encryption(check: str, says: str, do: str, *, ok: bool) -> Finding:
    """Return a finding that warns, unless *ok*, that others may read or change what is sent."""
    if ok:
        return Finding("ok", check, says)
    return Finding("warning", check, f"{says}, but the connection is not encrypted, or not verified", do)


async def _written(connection: Connection, check: str, *, is_verified: bool) -> Finding:
    """Check the schema, write as a create does, and say whether a commit ends."""
    await schema.check(connection)
    await _try_to_write(connection)
    try:
        # Postgres writes this message to its log alone, and its commit waits for a standby as any other does.
        message = "SELECT pg_logical_emit_message(true, 'doctor', '')"
        await connection.execute(message, timeout=_COMMIT_SECONDS)
    except TimeoutError:
        return Finding("wrong", check, "its commits wait", "see PostgresStandbyMissing in the runbook")
    return encryption(check, "takes writes, has the schema", _VERIFY_POSTGRES, ok=is_verified)


async def _try_to_write(connection: Connection) -> None:
    """Write ten pages with the locks of a create, which fails if the disk is full. Then roll back."""
    writing = connection.transaction()
    await writing.start()
    await connection.execute("SET LOCAL lock_timeout = '1s'")
    await connection.execute("LOCK TABLE calculation_request IN ROW EXCLUSIVE MODE")
    await connection.execute(
        """
        INSERT INTO outbox (lane, request_id, type, sequence, payload)
        SELECT 0, gen_random_uuid(), 'doctor', 1, convert_to(repeat('x', 1500), 'UTF8')
          FROM generate_series(1, 50)
        """
    )
    await writing.rollback()


def _secret_keys(text: str | None) -> Part:
    async def check(connection: Connection) -> AsyncIterator[Finding]:
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

    return check


_USED_KEYS = """
    SELECT id
      FROM secret_key
     UNION
    SELECT secret_key_id
      FROM (SELECT secret_key_id FROM calculation_request ORDER BY id DESC LIMIT 1000) AS newest
"""


def app_check(app_url: str) -> Check:
    """Return the check of the customers' application, to which the links in e-mails lead."""
    do = "customers cannot use their links: is APP_URL right, and the application well?"

    async def run() -> AsyncIterator[Finding]:
        try:
            status = await asyncio.to_thread(_status_of, app_url)
        except OSError as error:
            says = reason(error, {})
            # A worker's network policy may block the connection.
            yield Finding("warning" if says == _REASONS[TimeoutError] else "wrong", "application", says, do)
            return
        fault = Finding("wrong", "application", f"it answers {status}", do)
        yield fault if status >= 500 else Finding("ok", "application", "APP_URL is served")

    return Check("application", ["APP_URL"], run, do)


def _status_of(url: str) -> int:
    """Return the HTTP status of a GET. Raises OSError."""
    # From Python 3.12 on, every later call would use the context, and so the authorities, of the first.
    context = ssl.create_default_context()
    try:
        with urllib.request.urlopen(url, timeout=APP_SECONDS, context=context) as response:  # noqa: S310 - http
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:  # It holds the connection.
            return error.code
