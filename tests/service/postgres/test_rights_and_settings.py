"""What each role may not do in the database, and what its sessions take over from role, database or server.

The other tests run as these roles, so they may do enough.
"""

import asyncio
import re
from collections.abc import Sequence

import asyncpg
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.postgres import schema
from service.postgres.pool import Connection
from tests.harness import databases
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_and_probes, api_client, run
from tests.harness.processes import Ended, bare_environment
from tests.harness.waiting import eventually

EVERYBODY = ("api", "worker", "operator", "scaling")
BUT_OPERATOR, NOT_WORKER = ("api", "worker", "scaling"), ("api", "operator", "scaling")
REFUSED = {
    "CREATE TABLE mine ()": EVERYBODY,
    "INSERT INTO schema_version (version) VALUES (99)": EVERYBODY,
    "UPDATE operator_action SET operator = 'Eve'": EVERYBODY,
    "DELETE FROM operator_action": EVERYBODY,
    "DELETE FROM conveyancer": EVERYBODY,
    "UPDATE calculation_request SET property_value = 1": EVERYBODY,
    "UPDATE calculation_request SET customer_email = 'eve@example.com'": ("worker", "scaling"),
    "UPDATE calculation_request SET secret_salt = '', secret_key_id = ''": ("worker", "scaling"),
    "UPDATE calculation_request SET withdrawn_at = NULL": ("worker", "operator", "scaling"),
    "UPDATE calculation_request SET calculation_id = 'C-1'": NOT_WORKER,
    "DELETE FROM calculation_request": ("api", "scaling"),
    "UPDATE event SET time = now()": EVERYBODY,
    "UPDATE event SET data = '{}'": ("api", "scaling"),
    "DELETE FROM event": EVERYBODY,
    "SELECT FROM event": ("scaling",),
    "UPDATE outbox SET next_attempt_at = NULL": ("api", "scaling"),
    "SELECT name FROM conveyancer": ("api", "scaling"),
    "SELECT attempts, last_error, traceparent FROM outbox": ("api", "scaling"),
    "DELETE FROM outbox": NOT_WORKER,
    "INSERT INTO email (request_id, number, kind) VALUES (gen_random_uuid(), 1, '')": ("scaling",),
    "DELETE FROM email": EVERYBODY,
    "INSERT INTO conveyancer (id, name, charges_calculation_fee) VALUES ('e', 'e', true)": BUT_OPERATOR,
    "UPDATE conveyancer SET disabled_at = NULL": BUT_OPERATOR,
    "INSERT INTO api_key (prefix, key_sha256, client) VALUES ('', '', '')": BUT_OPERATOR,
    "UPDATE api_key SET revoked_at = NULL": BUT_OPERATOR,
    "SELECT FROM operator_action": BUT_OPERATOR,
    "INSERT INTO operator_action (action, operator) VALUES ('', '')": BUT_OPERATOR,
    "SELECT FROM api_key": ("worker", "scaling"),
    **dict.fromkeys(("SELECT FROM calculation_request", "SELECT server_reply FROM email"), ("scaling",)),
    "SELECT traceparent FROM email": ("scaling",),
}
_HARMFUL = "default_transaction_isolation = serializable; lock_timeout = 10; statement_timeout = 4999"
_HARMFUL += "; synchronous_commit = off"
# Each has the value that differs most from the default.
_HARMLESS = """
    DateStyle = 'SQL, DMY'; IntervalStyle = 'sql_standard'; TimeZone = 'Asia/Kathmandu'; array_nulls = off;
    bytea_output = 'escape'; check_function_bodies = off; client_encoding = 'LATIN1'; xmloption = 'document';
    default_transaction_deferrable = on; enable_indexscan = off; enable_seqscan = off; row_security = off;
    extra_float_digits = -15; idle_in_transaction_session_timeout = '1s'; idle_session_timeout = '500ms';
    jit = on; lock_timeout = '5s'; plan_cache_mode = 'force_generic_plan'; quote_all_identifiers = on;
    session_replication_role = replica; standard_conforming_strings = off; statement_timeout = '5s';
    synchronous_commit = 'remote_apply'; transform_null_equals = on; work_mem = '64kB'
    """


async def apply(database_url: str) -> Ended:
    return await run("service", "schema", "apply", environment=bare_environment(DATABASE_URL=database_url))


async def grant_again(database_url: str) -> None:
    """Let the owner apply the schema to a database that has it."""
    applied = await apply(databases.as_role(database_url, "owner"))
    assert (applied.status, applied.errors) == (0, "")


async def refuses_all(database_url: str, statements: Sequence[str], roles: Sequence[str] = EVERYBODY) -> None:
    """Check that none of *roles* may run any of *statements*."""
    for role in roles:
        async with databases.connected(databases.as_role(database_url, role)) as connection:
            for statement in statements:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(statement)


async def set_default(database: Connection, *settings: str) -> None:
    own = await database.fetchval("SELECT quote_ident(current_database())")
    for setting in settings:
        await database.execute(f"ALTER DATABASE {own} SET {setting}")


async def test_role_may_do_no_more_than_it_needs(database_url, database):
    tables = "SELECT array_agg(tablename::text) FROM pg_tables WHERE schemaname = 'public'"
    for table in await database.fetchval(tables):
        changes = ("DROP TABLE {}", "TRUNCATE {} CASCADE", "ALTER TABLE {} ADD COLUMN mine text")
        await refuses_all(database_url, [change.format(table) for change in changes])
    for role in EVERYBODY:
        await refuses_all(database_url, [each for each, roles in REFUSED.items() if role in roles], [role])


async def test_apply_takes_from_all_users_what_no_role_needs(database_url, database):
    """A copy of a database does not have the rights on the database of its template."""
    await database.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")

    await grant_again(database_url)

    await refuses_all(database_url, ["CREATE TEMPORARY TABLE mine ()", "CREATE TABLE mine ()"])


async def test_administrator_can_take_locks_and_large_objects_from_users(database_url, database):
    statements = (CHECKOUT / "deploy" / "restrict-users.sql").read_text()
    await database.execute(statements.replace("OWNER", databases.user_of("owner")))

    sessions = [f"SELECT {name}(1, 2)" for name in ("pg_advisory_lock", "pg_try_advisory_lock_shared")]
    objects = ["SELECT lo_create(0)", "SELECT lo_creat(-1)", "SELECT lo_from_bytea(0, '')"]
    await refuses_all(database_url, sessions + objects)
    files = [file for package in ("service", "worker") for file in (CHECKOUT / package).rglob("*.py")]
    texts = "".join(file.read_text() for file in files)
    used = set(re.findall(r"(pg_\w*advisory_xact_lock\w*)\(", texts))
    assert used
    async with databases.connected(databases.as_role(database_url, "api")) as connection:
        for name in used:
            await connection.execute(f"SELECT {name}(1, 2), {name}(3)")
    await grant_again(database_url)


async def test_role_that_is_created_later_gets_its_rights_from_the_next_apply(database_url, database):
    """Meanwhile its process waits, as it does for a missing schema. That it may read tables is not enough."""
    user = databases.user_of("worker")
    await database.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {user}")
    async with databases.connected(databases.as_role(database_url, "worker")) as connection:
        with pytest.raises(schema.SchemaOutdated):
            await schema.check(connection)

        await database.execute(f"GRANT pg_read_all_data TO {user}")
        await grant_again(database_url)

        await schema.check(connection)
        await database.execute(f"REVOKE pg_read_all_data FROM {user}")
        await connection.fetch("SELECT FROM event")


@pytest.mark.parametrize(
    ("role", "command", "message"),
    [
        ("operator", "conveyancer list", "Postgres at DATABASE_URL is unavailable: it rejects the login"),
        (
            "api",
            "conveyancer list",
            "Has the user of DATABASE_URL the rights of calculation_requests_operator?",
        ),
        ("api", "schema apply", "Has the user of DATABASE_URL the rights of the schema's owner?"),
    ],
)
async def test_command_says_which_right_its_user_lacks(database_url, database, role, command, message):
    if role == "operator":
        name = await database.fetchval("SELECT current_database()")
        await database.execute(f'REVOKE CONNECT ON DATABASE "{name}" FROM PUBLIC')
    await database.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {databases.user_of('worker')}")

    environment = bare_environment(DATABASE_URL=databases.as_role(database_url, role))
    ended = await run("service", *command.split(), environment=environment)

    assert (ended.status, ended.output) == (1, "")
    assert message in ended.errors


async def test_harmless_settings_change_nothing(service_settings, issuer, database, environment):
    await set_default(database, *_HARMLESS.split(";"))

    async with api_and_probes(service_settings, issuer.token()) as (caller, probes):
        assert (await probes.get("/readyz")).status_code == 200
        body = A_REQUEST | {"case_ref": "Łukasz \\ '"}
        key = {"Idempotency-Key": "key"}
        made, again = [await caller.post("/v1/request", json=body, headers=key) for _ in range(2)]
        shown = made.json()["data"]
        paths = (f"/v1/request/{shown['uuid']}", "/v1/request", f"/v1/request/{shown['uuid']}/events")
        read = [await caller.get(path) for path in paths]
    examined = await run("service", "doctor", environment=environment)

    assert [response.status_code for response in (made, again, *read)] == [200] * 5
    assert again.json()["data"] == read[0].json()["data"] == shown
    assert shown["case_ref"] == body["case_ref"]
    assert examined.status == 0, examined.output


@pytest.mark.parametrize("setting", _HARMFUL.split("; "))
async def test_harmful_setting_is_refused(setting, service_settings, database, database_url, environment):
    await set_default(database, setting)

    async with api_and_probes(service_settings, None) as (_, probes):
        ready = await probes.get("/readyz")
    examined = await run("service", "doctor", environment=environment)
    applied = await apply(database_url)

    assert (ready.status_code, examined.status, applied.status) == (503, 1, 1)
    for says in (ready.json()["postgres"], examined.output, applied.errors):
        assert f"Postgres has {setting}" in says


async def test_setting_changed_later_is_named_but_takes_no_process_away(service_settings, issuer, database):
    async with api_and_probes(service_settings, issuer.token()) as (caller, probes):

        async def answers() -> bool:
            return (await caller.get("/v1/request")).status_code == 200

        before = await probes.get("/readyz")
        await set_default(database, "statement_timeout = 4999")
        ours = "datname = current_database() AND application_name = 'calculation-requests'"
        await database.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}")  # noqa: S608
        await eventually(answers)
        ready = await probes.get("/readyz")

    assert (before.json()["postgres"], ready.status_code) == ("ok", 200)
    assert "Postgres has statement_timeout = 4999" in ready.json()["postgres"]


@pytest.mark.parametrize("isolation", ["'repeatable read'", "'serializable'"])
async def test_no_call_fails_for_its_isolation(isolation, service_settings, issuer, database):
    await set_default(database, f"default_transaction_isolation = {isolation}")

    async with api_client(service_settings, issuer.token()) as caller:
        keys = [{"Idempotency-Key": f"key-{number % 10}"} for number in range(60)]
        calls = [caller.post("/v1/request", json=A_REQUEST, headers=key) for key in keys]
        statuses = {response.status_code for response in await asyncio.gather(*calls)}

    assert statuses <= {200, 409, 503}


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_database_of_another_encoding_is_refused_by_name(encoding, administrator, postgres_server):
    name = f"of_{encoding.lower()}"
    await administrator.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    url = databases.url_of(postgres_server, name)

    applied = await apply(url)
    async with databases.connected(url) as connection:
        with pytest.raises(schema.SchemaOutdated, match=encoding):
            await schema.check(connection)
    await databases.drop(administrator, name)

    assert applied.errors == f"Postgres has server_encoding = {encoding}: choose UTF8 by CREATE DATABASE.\n"
