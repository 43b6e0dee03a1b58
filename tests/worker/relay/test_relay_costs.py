"""What the relay costs Postgres, in counts that are the same on every machine."""

import asyncio

from service.postgres.pool import Connection
from tests.harness.in_process import running
from tests.harness.stored import FILL_OUTBOX
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with
from worker.relay import pointers
from worker.relay.loop import Relay

_EVENT = b'{"data": {}}'
_PASSES_OF_A_WAKEUP = 2  # one that finds the event, one that finds nothing


async def test_relay_makes_one_more_pass_after_it_has_moved_something_and_then_waits_to_be_woken(
    database, worker_settings, linked_pool, statements
):
    woken = asyncio.Event()
    relay = Relay(settings_with(worker_settings, relay_poll_seconds=3600.0), linked_pool, woken)

    def passes() -> int:
        return sum("FOR UPDATE OF outbox" in each for each in statements.executed)

    async with running(relay.run):
        await eventually(lambda: passes() == 1)
        tasks = len(asyncio.all_tasks())
        await database.execute(FILL_OUTBOX, 1, _EVENT)
        woken.set()
        await eventually(lambda: passes() == 1 + _PASSES_OF_A_WAKEUP)
        woken.set()
        await eventually(lambda: passes() == 2 + _PASSES_OF_A_WAKEUP)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks + 2, seconds=5.0)  # of the last wait


async def test_events_that_wait_behind_a_held_one_do_not_slow_a_pass(database):
    """Measured in the rows and index entries that Postgres reads, with a plan made while it was empty."""
    async with database.transaction():
        await database.execute(pointers.SETTINGS)
        for _ in range(6):  # From the sixth on, Postgres keeps the plan.
            await pointers.lock(database, pending=2, held=2)
    await _hold_many(database, 20_000)

    async with database.transaction():
        await database.execute(pointers.SETTINGS)
        before = await _read_so_far(database)
        locked = await pointers.lock(database, pending=2, held=2)
        read = await _read_so_far(database) - before

    assert [(pointer.sequence, pointer.attempts) for pointer in locked] == [(1, 1)]
    assert read < 100


async def _read_so_far(database: Connection) -> int:
    """Return how many rows and index entries of outbox this session has read and not yet reported."""
    return int(
        await database.fetchval(
            """
            SELECT sum(pg_stat_get_xact_tuples_returned(relation) + pg_stat_get_xact_tuples_fetched(relation))
              FROM (SELECT 'outbox'::regclass::oid
                    UNION ALL
                    SELECT indexrelid
                      FROM pg_index
                     WHERE indrelid = 'outbox'::regclass) AS of_them (relation)
            """
        )
    )


async def _hold_many(database: Connection, events: int) -> None:
    """Hold one due event, and requests with a refused event and many waiting behind it."""
    await database.execute(FILL_OUTBOX, 1, _EVENT)
    await database.execute("UPDATE outbox SET attempts = 1, next_attempt_at = now()")
    await database.execute(
        """
        INSERT INTO outbox (request_id, sequence, attempts, next_attempt_at)
        SELECT md5((number % 16)::text)::uuid, number, (number <= 16)::integer, now() + interval '1 h'
          FROM generate_series(1, $1::integer) AS number
        """,
        events,
    )
    await database.execute("SELECT pg_stat_force_next_flush()")  # Otherwise these rows would be counted too.
