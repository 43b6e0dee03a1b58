"""What each role may not do in the database. The other tests run as these roles, so they may do enough."""

import re
from collections.abc import Sequence

import asyncpg
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.postgres import schema
from tests.harness import databases
from tests.harness.command_line import run
from tests.harness.processes import bare_environment

EVERYBODY = ("api", "worker", "operator", "scaling")
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
    "UPDATE calculation_request SET calculation_id = 'C-1'": ("api", "operator", "scaling"),
    "DELETE FROM calculation_request": ("api", "scaling"),
    "UPDATE event SET time = now()": EVERYBODY,
    "UPDATE event SET data = '{}'": ("api", "scaling"),
    "DELETE FROM event": EVERYBODY,
    "SELECT FROM event": ("scaling",),
    "UPDATE outbox SET next_attempt_at = NULL": ("api", "scaling"),
    "SELECT name FROM conveyancer": ("api", "scaling"),
    "SELECT attempts, last_error, traceparent FROM outbox": ("api", "scaling"),
    "DELETE FROM outbox": ("api", "operator", "scaling"),
    "INSERT INTO email (request_id, number, kind) VALUES (gen_random_uuid(), 1, '')": ("scaling",),
    "DELETE FROM email": EVERYBODY,
    "INSERT INTO conveyancer (id, name, charges_calculation_fee) VALUES ('e', 'e', true)": (
        *("api", "worker", "scaling"),
    ),
    "UPDATE conveyancer SET disabled_at = NULL": ("api", "worker", "scaling"),
    "INSERT INTO api_key (prefix, key_sha256, client) VALUES ('', '', '')": ("api", "worker", "scaling"),
    "UPDATE api_key SET revoked_at = NULL": ("api", "worker", "scaling"),
    "SELECT FROM operator_action": ("api", "worker", "scaling"),
    "INSERT INTO operator_action (action, operator) VALUES ('', '')": ("api", "worker", "scaling"),
    "SELECT FROM api_key": ("worker", "scaling"),
    "SELECT FROM calculation_request": ("scaling",),
    "SELECT server_reply FROM email": ("scaling",),
    "SELECT traceparent FROM email": ("scaling",),
}


@pytest.mark.parametrize("role", EVERYBODY)
async def test_role_may_do_no_more_than_it_needs(database_url, database, role):
    statements = [statement for statement, roles in REFUSED.items() if role in roles]
    rows = await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    assert ("operator_action",) in rows
    for [table] in rows:
        statements += [f"DROP TABLE {table}", f"TRUNCATE {table} CASCADE"]
        statements += [f"ALTER TABLE {table} ADD COLUMN mine text"]

    await refuses_all(database_url, statements, [role])


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
    used = {
        name
        for package in ("service", "worker")
        for file in (CHECKOUT / package).rglob("*.py")
        for name in re.findall(r"(pg_\w*advisory_xact_lock\w*)\(", file.read_text())
    }
    assert used
    async with databases.connected(databases.as_role(database_url, "api")) as connection:
        for name in used:
            await connection.execute(f"SELECT {name}(1, 2), {name}(3)")
    await grant_again(database_url)


async def grant_again(database_url: str) -> None:
    """Let the owner apply the schema to a database that has it."""
    owner = databases.as_role(database_url, "owner")
    applied = await run("service", "schema", "apply", environment=bare_environment(DATABASE_URL=owner))
    assert (applied.status, applied.errors) == (0, "")


async def refuses_all(database_url: str, statements: Sequence[str], roles: Sequence[str] = EVERYBODY) -> None:
    """Check that none of *roles* may run any of *statements*."""
    for role in roles:
        async with databases.connected(databases.as_role(database_url, role)) as connection:
            for statement in statements:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(statement)


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
