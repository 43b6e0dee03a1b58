"""What the endpoints cost Postgres, in counts that are the same on every machine."""

import pytest

from service.identifiers import new_request_id, uuid_of
from tests.benchmarks import subjects
from tests.harness.http import bearer
from tests.worker.conftest import store

_CALLS = 20
# 1,600 measured: a request in a table and four indexes, its event and its pointer in tables with two each.
_MOST_WAL_BYTES = 1_640


@pytest.mark.parametrize(("secret", "cost"), [("A" * 43, 1), ("A" * 42, 0)])
async def test_made_up_secret_costs_one_statement_whether_or_not_its_request_exists(
    watched_client, statements, database, secret, cost
):
    stored = await store(database)
    for uuid in (stored.uuid, uuid_of(new_request_id())):
        await watched_client.get(f"/v1/request/{uuid}", headers=bearer(secret))  # prepares the statement
        statements.clear()
        response = await watched_client.get(f"/v1/request/{uuid}", headers=bearer(secret))

        assert response.status_code == 401
        assert len(statements.executed) == statements.round_trips == cost


async def test_create_writes_little_wal(database):
    written = []
    for _ in range(_CALLS):
        before = await database.fetchval("SELECT pg_current_wal_insert_lsn()")
        await subjects.store(database)
        after = "SELECT pg_current_wal_insert_lsn() - $1::pg_lsn"
        written.append(await database.fetchval(after, before))

    # The minimum: sometimes a page is split, or written in full after a checkpoint.
    assert min(written) <= _MOST_WAL_BYTES
