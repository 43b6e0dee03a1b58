"""The schema versions: each is applied once, to a database in use."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import asyncpg
import httpx
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.calculation_requests import event_history
from service.postgres import schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from service.postgres.schema import SchemaOutdated, versions
from tests.harness.databases import has_waiting_statement
from tests.harness.examples import A_REQUEST
from tests.harness.metrics import rises
from tests.harness.waiting import eventually

EARLIER = [version.number for version in versions()[:-1]]


async def shape(database: Connection) -> set[tuple[str, str]]:
    """Return all definitions of the schema; the order of columns does not matter."""
    rows = await database.fetch(
        """
        WITH relation AS (
            SELECT *
              FROM pg_class
             WHERE relnamespace = 'public'::regnamespace
        )
        SELECT relname || '.' || attname AS name,
               concat_ws(' ', format_type(atttypid, atttypmod), attnotnull, attidentity,
                         pg_get_expr(adbin, adrelid)) AS definition
          FROM relation
          JOIN pg_attribute ON attrelid = relation.oid AND attnum > 0 AND NOT attisdropped
          LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
         WHERE relkind IN ('r', 'v')
         UNION ALL
        SELECT relname, concat_ws(' ', relkind, reloptions)
          FROM relation
         UNION ALL
        SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) || ' valid: ' || indisvalid
          FROM pg_index
          JOIN relation ON relation.oid = indrelid
         UNION ALL
        SELECT relname || ' ' || conname, pg_get_constraintdef(pg_constraint.oid) || ' ' || convalidated
          FROM pg_constraint
          JOIN relation ON relation.oid = conrelid
         UNION ALL
        SELECT relname, pg_get_viewdef(oid)
          FROM relation
         WHERE relkind = 'v'
         UNION ALL
        SELECT relname || ' ' || tgname, pg_get_triggerdef(pg_trigger.oid)
          FROM pg_trigger
          JOIN relation ON relation.oid = tgrelid
         WHERE NOT tgisinternal
         UNION ALL
        SELECT proname, pg_get_functiondef(oid)
          FROM pg_proc
         WHERE pronamespace = 'public'::regnamespace
         UNION ALL
        SELECT sequencename, concat_ws(' ', start_value, increment_by, max_value, cycle, cache_size)
          FROM pg_sequences
        """
    )
    return {(row["name"], row["definition"]) for row in rows}


async def empty(database: Connection, *, up_to: int = 0) -> None:
    """Reset the database to the schema version *up_to*."""
    await database.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    for version in versions()[:up_to]:
        for part in version.parts:
            await database.execute(part)


async def store_as_version_1_did(database: Connection) -> uuid.UUID:
    """Store a request and its event using only columns of version 1. Returns the request's id."""
    request_id = uuid.uuid4()
    await database.execute(
        """
        WITH stored AS (
            INSERT INTO calculation_request (
                       id, conveyancer_id, created_at, updated_at, customer_email, customer_first_name,
                       customer_last_name, sender_email, sender_organization_name, sender_first_name,
                       sender_last_name, case_ref, request_type, calculation_fee_exempt, secret_salt,
                       secret_key_id)
            VALUES ($1, 'acme-conveyancing', now(), now(), 'ada@customer.example.com', 'Ada', 'Lovelace',
                    'grace@firm.example.com', 'Hopper', 'Grace', 'Hopper', '12 High Street',
                    'SDLT_CALCULATION', false, '\\x00', 'current')
            RETURNING id
        ), announced AS (
            INSERT INTO outbox (lane, request_id, type, sequence, payload)
            SELECT 1, id, 'request.created', 1, '{}'
              FROM stored
        )
        INSERT INTO email (event_id, request_id)
        SELECT id::text, id
          FROM stored
        """,
        request_id,
    )
    return request_id


@contextlib.asynccontextmanager
async def requests_coming_in(database_url: str) -> AsyncIterator[list[uuid.UUID]]:
    """Store requests one after the other, as an older release does; yields the ids of those stored."""
    stored: list[uuid.UUID] = []
    enough = asyncio.Event()
    connection = await asyncpg.connect(database_url)
    await connection.execute("SET lock_timeout = '1s'")  # the default deadline of a caller's statements

    async def store() -> None:
        while not enough.is_set():
            stored.append(await store_as_version_1_did(connection))

    storing = asyncio.create_task(store())
    await eventually(lambda: stored or storing.done())
    yield stored
    seen = len(stored)
    await eventually(lambda: len(stored) > seen or storing.done())
    enough.set()
    await storing  # A rejected request fails the test here.
    await connection.close()


async def counts(database: Connection) -> list[int]:
    """Return the numbers of requests, events and e-mails."""
    (row,) = await database.fetch(
        """
        SELECT (SELECT count(*) FROM calculation_request),
               (SELECT count(*) FROM outbox),
               (SELECT count(*) FROM email)
        """
    )
    return list(row)


async def test_schema_sql_is_the_sum_of_all_versions(database: Connection) -> None:
    by_versions = await shape(database)
    await empty(database)

    await database.execute((CHECKOUT / "schema.sql").read_text())

    assert await shape(database) == by_versions
    await schema.check(database)


def test_every_version_ends_by_recording_its_number() -> None:
    for version in versions():
        record = f"\nINSERT INTO schema_version (version) VALUES ({version.number});\n"
        assert version.sql.endswith(record)


@pytest.mark.parametrize("version", EARLIER)
async def test_earlier_version_is_upgraded_while_requests_are_stored(
    version: int, database: Connection, database_url: str
) -> None:
    wanted = await shape(database)
    await empty(database, up_to=version)
    async with requests_coming_in(database_url) as stored:
        with pytest.raises(SchemaOutdated):
            await schema.check(database)

        applied = await schema.apply(database)

    assert applied == schema.VERSION
    await schema.check(database)
    assert await shape(database) == wanted
    assert await counts(database) == [len(stored)] * 3


async def test_requests_of_version_1_are_read_after_the_upgrade(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await empty(database, up_to=1)
    await database.execute("INSERT INTO conveyancer VALUES ('acme-conveyancing', 'Acme', true)")
    await store_as_version_1_did(database)

    await schema.apply(database)

    new = (await client.post("/v1/request", json=A_REQUEST, headers={"Idempotency-Key": "k"})).json()["data"]
    listed = (await client.get("/v1/request")).json()["data"]["requests"]
    assert {each["case_ref"] for each in listed} == {"12 High Street"}
    assert [each for each in listed if each["uuid"] == new["uuid"]] == [new]
    assert len(listed) == 2


CALCULATE_AS_VERSION_5_DID = """
    UPDATE calculation_request
       SET calculation_id = 'C-1', sequence = 2, calculation_sequence = 2, updated_at = $2
     WHERE id = $1
"""


@pytest.mark.parametrize("calculated", ["before the upgrade", "after it, by a worker of the earlier release"])
async def test_time_of_a_calculation_recorded_by_an_earlier_release_stays_the_same(
    database: Connection, calculated: str
) -> None:
    await empty(database, up_to=5)
    request_id = await store_as_version_1_did(database)
    at = datetime(2026, 3, 2, 9, 30, tzinfo=UTC)
    if calculated == "before the upgrade":
        await database.execute(CALCULATE_AS_VERSION_5_DID, request_id, at)
        await schema.apply(database)
    else:
        await schema.apply(database)
        await database.execute(CALCULATE_AS_VERSION_5_DID, request_id, at)
    [before] = await event_history.read(database, [request_id])

    await database.execute("UPDATE calculation_request SET updated_at = now()")

    [after] = await event_history.read(database, [request_id])
    assert before.calculated_at == after.calculated_at == at
    assert await database.fetchval("SELECT calculated_at FROM calculation_request") == at


async def test_request_without_a_calculation_has_no_time_of_one(database: Connection) -> None:
    request_id = await store_as_version_1_did(database)

    await database.execute("UPDATE calculation_request SET updated_at = now()")

    [history] = await event_history.read(database, [request_id])
    assert history.calculated_at is None
    assert await database.fetchval("SELECT calculated_at FROM calculation_request") is None


async def test_held_events_of_version_2_wait_in_turn_after_the_upgrade(database: Connection) -> None:
    await empty(database, up_to=2)
    first, other = uuid.uuid4(), uuid.uuid4()
    for number, request_id in enumerate((first, first, other, first), start=1):
        await database.execute(
            """
            INSERT INTO outbox_held (lane, id, request_id, type, sequence, payload, created_at, attempts,
                                     next_attempt_at)
            VALUES (0, $1, $2, 'request.calculated', 1, '', now(), 1, now())
            """,
            number,
            request_id,
        )
    due = "SELECT id FROM outbox_held WHERE next_attempt_at <= now() ORDER BY id"

    await schema.apply(database)
    before = await database.fetch(due)
    await database.execute("DELETE FROM outbox_held WHERE id = 1")  # as a relay of the earlier release does

    assert before == [(1,), (3,)]
    assert await database.fetch(due) == [(2,), (3,)]


async def test_trigger_of_held_events_finds_its_table_whatever_the_search_path(database: Connection) -> None:
    request_id = uuid.uuid4()
    await database.execute("SET search_path = ''")  # as pg_restore has it
    for number in (1, 2):
        await database.execute(
            """
            INSERT INTO public.outbox_held (lane, id, request_id, type, sequence, payload, created_at,
                                            attempts, next_attempt_at)
            VALUES (0, $1, $2, 'request.calculated', 1, '', now(), 1, now())
            """,
            number,
            request_id,
        )
    due = "SELECT id FROM public.outbox_held WHERE next_attempt_at <= clock_timestamp()"
    before = await database.fetch(due)

    await database.execute("DELETE FROM public.outbox_held WHERE id = 1")

    assert before == [(1,)]
    assert await database.fetch(due) == [(2,)]


async def test_upgrade_that_waits_for_the_outbox_does_not_block_new_event_ids(
    database: Connection, database_url: str
) -> None:
    await empty(database, up_to=2)
    upgrading = await asyncpg.connect(database_url)
    async with database.transaction():
        await database.execute("LOCK TABLE outbox IN ROW EXCLUSIVE MODE")  # as an INSERT begins
        applying = asyncio.create_task(schema.apply(upgrading))
        await eventually(lambda: has_waiting_statement(database))

        await database.execute("SET LOCAL lock_timeout = '20ms'; SELECT nextval('outbox_id_seq')")

    assert await applying == schema.VERSION
    await upgrading.close()


async def test_upgrade_lets_requests_through_while_it_waits_for_a_backup(
    database: Connection, database_url: str
) -> None:
    await empty(database, up_to=1)
    backup = await asyncpg.connect(database_url)
    upgrading = await asyncpg.connect(database_url)
    async with requests_coming_in(database_url) as stored:
        async with backup.transaction():
            await backup.execute("LOCK TABLE calculation_request IN ACCESS SHARE MODE")
            applying = asyncio.create_task(schema.apply(upgrading))
            await eventually(lambda: has_waiting_statement(database))
            seen = len(stored)
            await eventually(lambda: len(stored) > seen)
            assert not applying.done()
        assert await applying == schema.VERSION
    assert await counts(database) == [len(stored)] * 3
    await upgrading.close()
    await backup.close()


@pytest.mark.parametrize("version", [schema.VERSION, schema.VERSION + 1])
async def test_current_and_newer_schemas_are_neither_locked_nor_changed(
    version: int, database: Connection, database_url: str
) -> None:
    await database.execute("INSERT INTO schema_version VALUES ($1) ON CONFLICT DO NOTHING", version)
    backup = await asyncpg.connect(database_url)
    async with backup.transaction():
        for [table] in await backup.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
            await backup.execute(f"LOCK TABLE {table} IN SHARE MODE")
        await database.execute("SET default_transaction_read_only = on")

        async with asyncio.timeout(10):
            assert await schema.apply(database) == version
    await backup.close()


async def test_read_only_server_counts_as_unavailable(database: Connection) -> None:
    await database.execute("SET default_transaction_read_only = on")

    with rises("postgres_unavailable_total", by=1), pytest.raises(PostgresUnavailable):
        await schema.check(database)


async def test_two_processes_can_apply_the_schema_at_once(database: Connection, database_url: str) -> None:
    wanted = await shape(database)
    await empty(database)
    other = await asyncpg.connect(database_url)

    applied = await asyncio.gather(schema.apply(database), schema.apply(other))

    assert set(applied) == {schema.VERSION}
    assert await shape(database) == wanted
    await other.close()


async def test_interrupted_upgrade_is_finished_by_the_next(database: Connection, database_url: str) -> None:
    wanted = await shape(database)
    await empty(database, up_to=1)
    await store_as_version_1_did(database)
    reader = await asyncpg.connect(database_url)
    interrupted = await asyncpg.connect(database_url)
    async with reader.transaction(isolation="repeatable_read"):
        await reader.fetch("SELECT FROM conveyancer")  # takes a snapshot, which the index build waits for
        applying = asyncio.create_task(schema.apply(interrupted))
        await eventually(lambda: has_waiting_statement(database))
        await database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CREATE%CONCURRENTLY%'"
        )
        with pytest.raises(asyncpg.PostgresError):
            await applying
        assert await database.fetchval("SELECT EXISTS (SELECT FROM pg_index WHERE NOT indisvalid)")

    await schema.apply(database)

    assert await shape(database) == wanted
    await reader.close()
