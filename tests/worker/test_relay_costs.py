"""What the relay asks of Postgres: counts, which are the same on every machine."""

import asyncio

import msgspec
import pytest

from service import postgres
from service.postgres import Connection
from tests.conftest import eventually
from tests.statement_log import StatementLog
from tests.worker.forwarder import Forwarder
from worker.publisher import Publisher
from worker.relay import Relay
from worker.settings import WorkerSettings

_LANE = 3
_MOST_STATEMENTS = 6  # begin with its settings, lock, read, read what is held, delete, commit


async def fill_lane(database: Connection, events: int) -> None:
    """Put events of as many requests into one lane."""
    await database.execute(
        """
        INSERT INTO outbox (lane, request_id, type, sequence, payload)
        SELECT $1, gen_random_uuid(), 'request.created', 1, '{}'
          FROM generate_series(1, $2)
        """,
        _LANE,
        events,
    )


@pytest.mark.parametrize("events", [1, 200])
async def test_batch_takes_the_same_few_statements_however_large_it_is(
    database: Connection, worker_settings: WorkerSettings, publisher: Publisher, events: int
) -> None:
    statements = StatementLog()
    async with Forwarder(worker_settings.database_url, statements.watch) as forwarder:
        settings = msgspec.structs.replace(worker_settings, database_url=forwarder.url, database_pool_size=1)
        async with postgres.open_pool(settings) as pool:
            relay = Relay(settings, pool, asyncio.Event())
            await fill_lane(database, 1)
            await relay.relay_lanes(publisher, [_LANE])  # prepares its statements
            await fill_lane(database, events)
            statements.clear()

            assert await relay.relay_lanes(publisher, [_LANE]) == events

    assert len(statements.executed) <= _MOST_STATEMENTS, statements.executed
    assert statements.round_trips == len(statements.executed)


async def test_delivered_event_leaves_one_dead_tuple(
    database: Connection, worker_settings: WorkerSettings, publisher: Publisher
) -> None:
    events = 200
    await fill_lane(database, events)

    async with postgres.open_pool(worker_settings) as pool:  # Postgres counts when the connection ends.
        await Relay(worker_settings, pool, asyncio.Event()).relay_lanes(publisher, [_LANE])

    async def written() -> tuple[int, int] | None:
        await database.execute("SELECT pg_stat_clear_snapshot()")
        row = await database.fetchrow(
            "SELECT n_tup_upd, n_tup_del FROM pg_stat_user_tables WHERE relname = 'outbox'"
        )
        assert row is not None
        return (row["n_tup_upd"], row["n_tup_del"]) if row["n_tup_del"] else None

    assert await eventually(written) == (0, events)
    held = "SELECT n_tup_ins FROM pg_stat_user_tables WHERE relname = 'outbox_held'"
    assert await database.fetchval(held) == 0
