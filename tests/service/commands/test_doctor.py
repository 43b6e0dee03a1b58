"""`python -m service doctor` on real servers, with and without problems."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from yarl import URL

from deploy.local.machine.ports import free_port
from service.commands.doctor import examine_service
from service.diagnosis import Finding
from service.identifiers import parse_uuid
from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.harness.certificates import Authority
from tests.harness.command_line import run
from tests.harness.examples import A_REQUEST
from tests.harness.issuer import Issuer
from tests.harness.processes import environment_of

CHECKS = [
    "settings",
    "postgres",
    "schema",
    "event ids",
    "clock",
    "connections",
    "secret keys",
    "signing keys",
]


@pytest.fixture
def environment(service_settings: ServiceSettings) -> dict[str, str]:
    """The environment of an API without problems."""
    return environment_of(service_settings)


async def found(
    environment: Mapping[str, str], check: str, *, processes: int = 1, timeout_seconds: float = 10.0
) -> Finding:
    """Return the finding of one check."""
    findings = await examine_service(environment, processes=processes, timeout_seconds=timeout_seconds)
    [finding] = [finding for finding in findings if finding.check == check]
    return finding


@asynccontextmanager
async def answering(
    answer: bytes | None, context: ssl.SSLContext | None = None, *, after_seconds: float = 0
) -> AsyncIterator[int]:
    """Answer every connection with the same bytes, or never. Yields the port."""
    connections: list[asyncio.WriteTransport] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer.transport)
        try:
            if answer is not None:
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(after_seconds)
                writer.write(answer)
            else:
                await reader.read()  # until the client gives up
        except (asyncio.IncompleteReadError, OSError):
            pass  # The client spoke another protocol, or has disconnected.
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]
        # From Python 3.12 on the server's end waits for them, and a client may keep its own open.
        for connection in connections:
            connection.abort()


async def test_healthy_environment_has_no_failures(environment: Mapping[str, str]) -> None:
    findings = await examine_service(environment, processes=1, timeout_seconds=10.0)

    assert [(finding.check, finding.state) for finding in findings] == [(check, "ok") for check in CHECKS]


async def test_command_prints_a_line_for_each_check(environment: Mapping[str, str]) -> None:
    ended = await run("service", "doctor", environment=environment)

    assert (ended.status, ended.errors) == (0, "")
    assert [line.split()[0] for line in ended.output.splitlines()] == ["ok"] * len(CHECKS)


async def test_command_says_what_fails_and_prints_no_secret(environment: dict[str, str]) -> None:
    environment["DATABASE_URL"] = f"postgresql://me:hunter2@127.0.0.1:{free_port()}/x"
    environment["AUTH_JWKS_URL"] = f"https://me:hunter2@127.0.0.1:{free_port()}/jwks"
    environment["REQUEST_SECRET_KEYS"] = "current:hunter2"

    ended = await run("service", "doctor", "--json", environment=environment)

    states = {finding["check"]: finding["state"] for finding in json.loads(ended.output)}
    assert states == {"settings": "fail", "postgres": "fail", "signing keys": "fail"}
    assert (ended.status, ended.errors) == (1, "")
    assert "hunter2" not in ended.output


async def test_every_bad_variable_is_named_and_its_checks_are_skipped(
    environment: dict[str, str],
) -> None:
    environment |= {"PORT": "eighty", "DATABASE_URL": "mysql://x", "AUTH_JWKS_URL": "", "LOG_LEVEL": "LOUD"}
    environment |= {"REQUEST_SECRET_KEYS": "x"}

    findings = await examine_service(environment, processes=1, timeout_seconds=10.0)

    wrong = [finding.says for finding in findings if finding.state == "fail"]
    named = ("AUTH_JWKS_URL", "DATABASE_URL", "LOG_LEVEL", "PORT", "REQUEST_SECRET_KEYS")
    assert len(wrong) == len(named)
    assert all(name in says for name, says in zip(named, wrong, strict=True))
    assert [(finding.check, finding.says) for finding in findings if finding.state == "warn"] == [
        ("postgres", "not checked without DATABASE_URL"),
        ("signing keys", "not checked without AUTH_JWKS_URL"),
    ]


# Postgres


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"port": 1}, "connection refused"),
        ({"host": "nowhere.invalid"}, "unknown host"),
        ({"path": "/no-such-database"}, "no such database"),
        ({"user": "nobody-here"}, "user or password refused"),
    ],
)
async def test_unavailable_postgres_is_found(
    environment: dict[str, str], changes: dict[str, str | int], says: str
) -> None:
    url = URL(environment["DATABASE_URL"])
    for part, value in changes.items():
        url = getattr(url, f"with_{part}")(value)
    environment["DATABASE_URL"] = str(url)

    finding = await found(environment, "postgres")

    assert (finding.state, finding.says) == ("fail", says)
    assert finding.hint is not None


async def test_wait_for_a_silent_postgres_is_limited(environment: dict[str, str]) -> None:
    async with answering(None) as port:
        environment["DATABASE_URL"] = f"postgresql://127.0.0.1:{port}/x"

        finding = await found(environment, "postgres", timeout_seconds=0.3)

    assert (finding.state, finding.says) == ("fail", "no answer within 0.3 s")


async def test_checks_run_concurrently(environment: dict[str, str], authority: Authority) -> None:
    async with answering(None) as one, answering(None, authority.server_context()) as other:
        environment["DATABASE_URL"] = f"postgresql://127.0.0.1:{one}/x"
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{other}/jwks"

        async with asyncio.timeout(1.8):
            findings = await examine_service(environment, processes=1, timeout_seconds=1.0)

    assert [finding.state for finding in findings] == ["ok", "fail", "fail"]


@pytest.mark.parametrize(
    "statement",
    ["ALTER SEQUENCE outbox_id_seq CACHE 20", "ALTER TABLE outbox DISABLE TRIGGER USER"],
    ids=["cache", "trigger"],
)
async def test_event_ids_out_of_order_are_found(
    environment: dict[str, str], database: Connection, statement: str
) -> None:
    await database.execute(statement)

    finding = await found(environment, "event ids")

    assert finding.state == "fail"


@pytest.mark.parametrize(
    "statement", ["DELETE FROM schema_version", "DROP TABLE schema_version"], ids=["older", "none"]
)
async def test_outdated_schema_is_found(
    environment: Mapping[str, str], database: Connection, statement: str
) -> None:
    await database.execute(statement)

    finding = await found(environment, "schema")

    assert (finding.state, finding.hint) == ("fail", "run `python -m service schema apply`")


async def test_read_only_database_is_found(environment: Mapping[str, str], database: Connection) -> None:
    name = await database.fetchval("SELECT current_database()")
    await database.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')

    finding = await found(environment, "schema")

    assert (finding.state, finding.says) == ("fail", "Postgres is read-only")


async def test_key_missing_from_the_ring_is_found(
    environment: dict[str, str], client: httpx.AsyncClient, database: Connection
) -> None:
    for number in range(3):
        response = await client.post("/v1/request", json=A_REQUEST)
        assert response.status_code == 200, number
    before = await found(environment, "secret keys")
    request_id = parse_uuid(response.json()["data"]["uuid"])
    await database.execute("UPDATE calculation_request SET secret_key_id = 'lost' WHERE id = $1", request_id)

    finding = await found(environment, "secret keys")

    assert (before.state, before.says) == ("ok", "has every key of 3 sampled requests")
    assert finding.state == "fail"
    assert "REQUEST_SECRET_KEYS lacks lost," in finding.says
    assert "A" * 43 not in finding.says


async def test_missing_key_is_found_in_the_middle_of_many_requests(
    environment: dict[str, str], database: Connection
) -> None:
    await database.execute(
        """
        INSERT INTO calculation_request (
                   id, conveyancer_id, created_at, updated_at, customer_email, customer_first_name,
                   customer_last_name, sender_email, sender_organization_name, sender_first_name,
                   sender_last_name, case_ref, request_type, calculation_fee_exempt, secret_salt,
                   secret_key_id)
        SELECT ('0' || to_hex(1700000000000 + number * 60000::bigint) || '70008000000000000000')::uuid,
               'acme', now(), now(), '', '', '', '', '', '', '', '', '', false, '',
               CASE WHEN number BETWEEN 20000 AND 20200 THEN 'lost' ELSE 'current' END
          FROM generate_series(1, 40000) AS number
        """
    )

    finding = await found(environment, "secret keys")

    assert (finding.state, finding.hint) == ("fail", "put it back: without it their links cannot be made")


@pytest.mark.parametrize(("seconds", "state"), [(5, "warn"), (-5, "warn"), (60, "fail")])
async def test_clock_that_differs_is_found(
    environment: Mapping[str, str], database: Connection, seconds: int, state: str
) -> None:
    name = await database.fetchval("SELECT current_database()")
    await database.execute(
        f"""
        CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql
        RETURN pg_catalog.clock_timestamp() + interval '{seconds} seconds'
        """
    )
    await database.execute(f'ALTER DATABASE "{name}" SET search_path = public, pg_catalog')

    finding = await found(environment, "clock")

    says = re.fullmatch(r"([0-9]+\.[0-9]) s from the clock of Postgres", finding.says)
    assert finding.state == state
    assert says is not None
    # The error is half of the round trip, which is long on a busy machine.
    assert float(says[1]) == pytest.approx(abs(seconds), abs=2.0)


async def test_demand_for_more_connections_than_postgres_has_is_found(environment: dict[str, str]) -> None:
    environment["DATABASE_POOL_SIZE"] = "20"

    assert (await found(environment, "connections", processes=1)).state == "ok"
    finding = await found(environment, "connections", processes=100)

    assert finding.state == "fail"
    assert finding.says.startswith("needs 2000 of ")


async def test_limit_of_the_database_and_connections_of_other_clients_count(
    environment: Mapping[str, str], database: Connection
) -> None:
    name = await database.fetchval("SELECT current_database()")
    others = int(
        await database.fetchval(
            """
            SELECT count(*)
              FROM pg_stat_activity
             WHERE datid IS NOT NULL
               AND application_name NOT LIKE 'calculation-requests%'
            """
        )
    )

    states = []
    for limit in (9, 10, 10 + others + 10):
        await database.execute(f'ALTER DATABASE "{name}" CONNECTION LIMIT {limit}')
        states.append((await found(environment, "connections")).state)

    assert states == ["fail", "warn", "ok"]


# The issuer's keys


def http_answer(status: str, body: bytes) -> bytes:
    """Return a complete HTTP response."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        status.encode(),
        len(body),
        body,
    )


async def test_keys_are_fetched_over_tls(
    environment: dict[str, str], issuer: Issuer, authority: Authority
) -> None:
    answer = http_answer("200 OK", issuer.jwks.read_bytes())
    async with answering(answer, authority.server_context()) as port:
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{port}/jwks"

        finding = await found(environment, "signing keys")

    assert finding.state == "ok"


async def test_issuer_may_be_slower_than_callers_wait(
    environment: dict[str, str], issuer: Issuer, authority: Authority
) -> None:
    answer = http_answer("200 OK", issuer.jwks.read_bytes())
    async with answering(answer, authority.server_context(), after_seconds=1.5) as port:
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{port}/jwks"

        finding = await found(environment, "signing keys")

    assert finding.state == "ok"


async def test_missing_key_document_is_found(environment: dict[str, str], authority: Authority) -> None:
    async with answering(http_answer("404 Not Found", b""), authority.server_context()) as port:
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{port}/jwks"

        finding = await found(environment, "signing keys")

    assert (finding.state, finding.says) == ("fail", "HTTP status 404")


@pytest.mark.parametrize(
    ("days", "address", "says"),
    [(-1, "127.0.0.1", "certificate has expired"), (365, "127.0.0.2", "IP address mismatch")],
)
async def test_certificate_of_the_issuer_is_checked(
    environment: dict[str, str], authority: Authority, days: float, address: str, says: str
) -> None:
    context = authority.server_context(days=days, address=address)
    async with answering(http_answer("200 OK", b""), context) as port:
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{port}/jwks"

        finding = await found(environment, "signing keys")

    assert finding.state == "fail"
    assert says in finding.says


async def test_issuer_that_does_not_speak_tls_is_found(environment: dict[str, str]) -> None:
    async with answering(http_answer("200 OK", b"") + b"\r\n\r\n") as port:
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{port}/jwks"

        finding = await found(environment, "signing keys", timeout_seconds=2.0)

    assert finding.state == "fail"


@pytest.mark.parametrize("document", [None, b"", b'{"keys": []}'], ids=["missing", "empty", "no keys"])
async def test_document_without_usable_keys_is_found(
    environment: dict[str, str], tmp_path: Path, document: bytes | None
) -> None:
    file = tmp_path / "jwks.json"
    if document is not None:
        file.write_bytes(document)
    environment["AUTH_JWKS_URL"] = file.as_uri()

    finding = await found(environment, "signing keys")

    assert finding.state == "fail"


async def test_user_without_the_right_to_connect_is_found(
    environment: dict[str, str], administrator: Connection
) -> None:
    await administrator.execute("DROP ROLE IF EXISTS doctored")
    await administrator.execute("CREATE ROLE doctored NOLOGIN")
    environment["DATABASE_URL"] = str(URL(environment["DATABASE_URL"]).with_user("doctored"))

    finding = await found(environment, "postgres")

    await administrator.execute("DROP ROLE doctored")
    assert (finding.state, finding.says) == ("fail", "user or password refused")
