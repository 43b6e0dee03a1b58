"""The schema: laid into an empty database, and carried forward by versions while the database is in use."""

import asyncio
import re
import shutil
import sys
from pathlib import Path

import asyncpg
import pytest
from yarl import URL

from deploy.local.machine.folders import CHECKOUT
from service.commands import schema as schema_command
from service.postgres import schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from service.postgres.schema import SchemaOutdated, read_versions
from tests.harness.databases import has_waiting_statement
from tests.harness.in_process import run
from tests.harness.metrics import rises
from tests.harness.processes import Ended, bare_environment
from tests.harness.stored import count_rows
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker.conftest import announce_next, store

# Versions after the first release: a column more of two tables, and an index that is built concurrently.
SAMPLE = read_versions(Path(__file__).parent / "sample_versions")
NEWEST = 1 + len(SAMPLE)
APPLIED = f"the schema has version {schema.VERSION}, and each role has its rights\n"


async def empty(database: Connection) -> None:
    await database.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


async def has_sample(database: Connection) -> bool:
    """Whether the sample versions were applied completely."""
    await database.fetch("SELECT r.reference, o.reference FROM calculation_request r, outbox o LIMIT 0")
    index = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'calculation_request_case_ref'::regclass"
    return bool(await database.fetchval(index))


async def test_schema_is_laid_by_a_copy_that_has_what_the_image_has(database, database_url, tmp_path):
    for line in (CHECKOUT / "deploy/Dockerfile").read_text().splitlines():
        match line.split():
            case ["COPY", source, target] if target.startswith("/app/"):
                copy = shutil.copytree if (CHECKOUT / source).is_dir() else shutil.copy
                copy(CHECKOUT / source, tmp_path / target.removeprefix("/app/"))
    await empty(database)

    applying = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service", "schema", "apply"),
        env=bare_environment(DATABASE_URL=database_url),
        cwd=tmp_path,
    )

    assert await applying.wait() == 0
    assert await schema.read_version(database) == schema.VERSION
    again = await run("service", "schema", "apply", environment=bare_environment(DATABASE_URL=database_url))
    assert again == Ended(0, APPLIED, "")


async def test_command_waits_for_postgres_and_says_why(database_url):
    async with TcpProxy(database_url) as link:
        await link.refuse()
        environment = bare_environment(DATABASE_URL=link.url)
        applying = asyncio.create_task(run("service", "schema", "apply", environment=environment))
        await eventually(lambda: link.refused)
        link.admit()
        applied = await asyncio.wait_for(applying, 60)

    assert (applied.status, applied.output) == (0, APPLIED)
    assert re.fullmatch("Postgres at DATABASE_URL is unavailable: .+; waiting for it\n", applied.errors)


@pytest.mark.parametrize(
    ("limit", "user", "reason"),
    [
        ("_OUTAGE_SECONDS", None, "Postgres at DATABASE_URL is unavailable: connection refused"),
        ("_REJECTED_SECONDS", "nobody_here", "Postgres at DATABASE_URL is unavailable: it rejects the login"),
    ],
)
async def test_command_fails_in_the_end_for_a_new_password(monkeypatch, database_url, limit, user, reason):
    monkeypatch.setattr(schema_command, limit, 0.5)
    url = URL(database_url)
    url = url.with_user(user).with_password("wrong") if user else url.with_port(1)

    async with asyncio.timeout(60):
        ended = await run("service", "schema", "apply", environment=bare_environment(DATABASE_URL=str(url)))

    assert ended == Ended(1, "", f"{reason}; waiting for it\n{reason}\n")


async def test_versions_are_applied_while_requests_are_stored(database, database_url, other_connection):
    earlier_release = await asyncpg.connect(database_url)
    stored: list[object] = []
    enough = asyncio.Event()

    async def store_all() -> None:
        await earlier_release.execute("SET lock_timeout = '1s'")  # the default deadline of a statement
        while not enough.is_set():
            stored.append(await store(earlier_release))
        await earlier_release.close()

    async def one_more_is_stored() -> None:
        seen = len(stored)
        await eventually(lambda: len(stored) > seen or storing.done())

    storing = asyncio.create_task(store_all())
    await one_more_is_stored()
    async with database.transaction():
        await database.execute("LOCK TABLE calculation_request IN ACCESS SHARE MODE")  # as a backup does
        applying = asyncio.create_task(schema.apply(other_connection, SAMPLE))
        await eventually(lambda: has_waiting_statement(database))
        await one_more_is_stored()
        assert not applying.done()
    assert await applying == NEWEST
    await one_more_is_stored()
    enough.set()
    await storing  # A rejected request fails the test here.

    assert await has_sample(database)
    assert await count_rows(database) == (len(stored), len(stored))


async def test_interrupted_version_is_finished_by_the_next_run(database, database_url, other_connection):
    reader = await asyncpg.connect(database_url)
    async with reader.transaction(isolation="repeatable_read"):
        await reader.fetch("SELECT FROM conveyancer")  # takes a snapshot, which the index build waits for
        applying = asyncio.create_task(schema.apply(other_connection, SAMPLE))
        await eventually(lambda: has_waiting_statement(database))
        await database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CREATE%CONCURRENTLY%'"
        )
        with pytest.raises(asyncpg.PostgresError):
            await applying
        assert not await has_sample(database)
    await reader.close()

    assert await schema.apply(database, SAMPLE) == NEWEST

    assert await has_sample(database)


async def test_newest_version_comes_with_its_rights_or_not_at_all(database, other_connection):
    async def gave_up() -> bool:
        return not await has_waiting_statement(database)

    async with database.transaction():
        await database.execute("GRANT SELECT ON schema_version TO calculation_requests_worker")
        applying = asyncio.create_task(schema.apply(other_connection, SAMPLE[:1]))
        await eventually(lambda: has_waiting_statement(database))
        await eventually(gave_up)
        assert await schema.read_version(database) == 1
        assert not applying.done()

    assert await applying == 2


async def test_grant_that_commits_meanwhile_delays_the_schema(database, other_connection):
    async with database.transaction():
        await database.execute("GRANT SELECT ON schema_version TO calculation_requests_worker")
        applying = asyncio.create_task(schema.apply(other_connection, SAMPLE))
        await eventually(lambda: has_waiting_statement(database))

    assert await applying == NEWEST


async def test_two_processes_can_apply_the_schema_at_once(database, other_connection):
    await empty(database)

    applied = await asyncio.gather(*(schema.apply(each, SAMPLE) for each in (database, other_connection)))

    assert applied == [NEWEST] * 2
    assert await has_sample(database)


@pytest.mark.parametrize("version", [schema.VERSION, schema.VERSION + 1])
async def test_tables_of_current_and_newer_schemas_are_not_locked(version, database, other_connection):
    await database.execute("INSERT INTO schema_version VALUES ($1) ON CONFLICT DO NOTHING", version)
    async with other_connection.transaction():
        for [table] in await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
            await other_connection.execute(f"LOCK TABLE {table} IN SHARE MODE")
        if version > schema.VERSION:
            await database.execute("SET default_transaction_read_only = on")  # It changes nothing.

        async with asyncio.timeout(10):
            assert await schema.apply(database) == version


@pytest.mark.parametrize(
    "theirs",
    [
        "CREATE TABLE customer (id integer)",
        "CREATE TABLE schema_version (version integer)",
        "CREATE TABLE schema_version AS SELECT 1 AS version, 'of another schema.sql' AS fingerprint",
    ],
)
async def test_schema_of_others_is_refused_in_one_line(theirs, database, database_url):
    await empty(database)
    await database.execute(theirs)

    with pytest.raises(SchemaOutdated):
        await schema.check(database)
    ended = await run("service", "schema", "apply", environment=bare_environment(DATABASE_URL=database_url))

    assert (ended.status, ended.output) == (1, "")
    assert re.fullmatch("The database has tables .+: use an empty one. .+ `make clean`.\n", ended.errors)
    assert await database.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 1


async def test_read_only_server_counts_as_unavailable(database):
    await database.execute("SET default_transaction_read_only = on")

    with rises("postgres_unavailable_total", by=1), pytest.raises(PostgresUnavailable):
        await schema.check(database)


async def test_events_of_another_server_are_refused_until_apply_has_put_them_first(database):
    """As after `pg_dump | pg_restore`: this server has not reached their transactions."""
    request = await store(database)
    await announce_next(database, request.id)
    await database.execute("UPDATE event SET transaction = '9000000000000'")

    with pytest.raises(SchemaOutdated, match="copied from another server"):
        await schema.check(database)
    await schema.apply(database)

    await schema.check(database)
    await announce_next(database, request.id)
    ordered = "SELECT sequence, transaction <> '0' FROM event ORDER BY transaction, sequence"
    assert await database.fetch(ordered) == [(1, False), (2, False), (3, True)]
