"""Creates are stored in groups: who shares a transaction, what each gets, and that each key is used once."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from service.calculation_requests.model import CalculationRequest, Idempotency, IdempotencyKeyReused
from service.calculation_requests.storing import Storage
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.group_commit import LARGEST_GROUP, GroupCommit
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, open_pool
from tests.harness import databases, stored
from tests.harness.databases import has_waiting_statement
from tests.harness.examples import FREE_CONVEYANCER
from tests.harness.waiting import eventually

SECONDS = 5.0
QUEUE_SIZE = 32  # of a pool with one connection
INSERT = "INSERT INTO stored (id, note) SELECT $1, $2 WHERE $2 <> 'nothing' RETURNING id"
Outcome = tuple[CalculationRequest, bool]  # the stored request, and whether it is a repeat
BODY, OTHER_BODY = b"a" * 32, b"b" * 32  # the SHA-256 of each


@pytest.fixture
async def table(database):
    await database.execute("CREATE TABLE stored (id int PRIMARY KEY, note text CHECK (note <> 'refused'))")
    await database.execute(f"GRANT ALL ON stored TO {databases.user_of('api')}")


@pytest.fixture
async def group_commit(table, pool, statements):  # noqa: ARG001 - it stores in the table
    """A group commit whose statement is already prepared."""
    opened = GroupCommit(pool, INSERT, seconds=SECONDS)
    await execute(opened, 0)
    statements.clear()
    return opened


async def execute(group: GroupCommit, row_id: int, note: str = "a", *, seconds: float = SECONDS) -> bool:
    """Store a row; return whether it was stored."""
    until = time.monotonic() + seconds
    return await group.execute(row_id, (row_id, note), until=until) is not None


async def execute_all(group: GroupCommit, notes: Iterable[str], *, seconds: float = SECONDS) -> list[Any]:
    """Store all *notes* concurrently, under the ids 1, 2 and so on."""
    storing = (execute(group, number, note, seconds=seconds) for number, note in enumerate(notes, 1))
    return await asyncio.gather(*storing, return_exceptions=True)


def started(group: GroupCommit, *ids: int, seconds: float = SECONDS) -> list[asyncio.Task[bool]]:
    """Start callers, which store these ids from the next turn of the event loop on. The first one leads."""
    return [asyncio.create_task(execute(group, each, seconds=seconds)) for each in ids]


async def stored_ids(database: Connection) -> list[int]:
    return [row["id"] for row in await database.fetch("SELECT id FROM stored WHERE id > 0 ORDER BY id")]


async def test_concurrent_callers_share_a_round_trip_and_a_transaction(group_commit, database, statements):
    outcomes = await execute_all(group_commit, ["a", "a", "nothing", "a", "a"])

    assert outcomes == [True, True, False, True, True]
    assert await stored_ids(database) == [1, 2, 4, 5]
    assert (len(statements.executed), statements.round_trips) == (5, 1)
    assert await database.fetchval("SELECT count(DISTINCT xmin::text) FROM stored WHERE id > 0") == 1

    statements.clear()
    await execute_all(group_commit, ["nothing"] * (LARGEST_GROUP + 1))
    assert statements.round_trips == 2


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("cache_size", [0, 100])
@pytest.mark.parametrize(
    ("note", "error"), [("refused", asyncpg.CheckViolationError), ("\ud800", asyncpg.DataError)]
)
async def test_rejected_arguments_leave_no_transaction(service_settings, database, note, error, cache_size):
    """Without a statement cache asyncpg has begun a transaction by then, and does not end it."""
    others = "SELECT count(xact_start) FROM pg_stat_activity WHERE datname = current_database() AND pid <> $1"

    async def no_transaction_is_open() -> bool:
        return not await database.fetchval(others, database.get_server_pid())

    changes = {"database_statement_cache_size": cache_size, "database_pool_size": 1}
    async with open_pool(replace(service_settings, **changes)) as pool:
        group_commit = GroupCommit(pool, INSERT, seconds=SECONDS)
        outcomes = await execute_all(group_commit, ["a", note, "a"])
        await eventually(no_transaction_is_open)
        assert await execute_all(group_commit, ["a", "a"]) == [True, True]

    assert [type(outcome) for outcome in outcomes] == [error, PostgresUnavailable, PostgresUnavailable]
    assert await stored_ids(database) == [1, 2]


@pytest.mark.parametrize(
    "notes",
    [["a"] * 5, ["a" * 2_000_000] * LARGEST_GROUP],
    ids=["Postgres does not answer", "Postgres reads no more input"],
)
async def test_whole_group_fails_in_time_and_the_next_is_served(group_commit, pool, link, notes):
    await execute(group_commit, 0, "nothing")  # connects
    impatient = GroupCommit(pool, INSERT, seconds=1.0)
    link.hold()
    async with asyncio.timeout(30):  # Without a deadline, of asyncpg's own for input, this would never end.
        outcomes = await execute_all(impatient, notes, seconds=1.0)
    link.resume()

    assert [type(outcome) for outcome in outcomes] == [PostgresUnavailable] * len(notes)
    await link.cut()

    async def serves_again() -> bool:
        return await execute_all(impatient, ["nothing"], seconds=1.0) == [False]

    await eventually(serves_again)


async def test_followers_count_in_the_queue_and_are_refused_when_it_is_full(group_commit, pool, database):
    async with connections.acquired(pool, seconds=SECONDS):
        waiting = started(group_commit, *range(1, QUEUE_SIZE + 1))
        await asyncio.sleep(0)
        with pytest.raises(PostgresUnavailable):
            pool.check_available()
        with pytest.raises(PostgresUnavailable):
            await execute(group_commit, QUEUE_SIZE + 1)
    await asyncio.gather(*waiting)

    pool.check_available()
    assert await stored_ids(database) == list(range(1, QUEUE_SIZE + 1))


async def test_cancelled_callers_store_nothing_and_lead_nobody(group_commit, pool, database):
    async with connections.acquired(pool, seconds=SECONDS):
        leader, follower = started(group_commit, 1, 2)
        await asyncio.sleep(0)
        follower.cancel()
    assert await leader
    assert follower.cancelled()

    async with connections.acquired(pool, seconds=SECONDS):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(execute(group_commit, 3), 0.01)
        (other,) = started(group_commit, 4)
        await asyncio.sleep(0)
    assert await asyncio.wait_for(other, SECONDS)
    assert await stored_ids(database) == [1, 4]


async def test_leader_cancelled_in_the_statement_fails_followers(group_commit, pool, database, statements):
    async def has_ended() -> bool:
        return not await has_waiting_statement(database)  # Postgres has read that it is cancelled.

    async with database.transaction():
        await database.execute("LOCK TABLE stored")
        leader, follower = started(group_commit, 1, 2)
        await eventually(lambda: statements.round_trips == 1)
        leader.cancel()
        with pytest.raises(PostgresUnavailable):
            await follower
        await eventually(has_ended)

    assert leader.cancelled()
    assert await execute(group_commit, 3)
    assert await stored_ids(database) == [3]
    assert (len(pool.opened), len(pool.idle)) == (1, 1)


@pytest.mark.usefixtures("table")
async def test_late_callers_do_not_join_a_leader_that_has_waited_long(pool, database):
    group_commit = GroupCommit(pool, INSERT, seconds=2.0)
    async with connections.acquired(pool, seconds=SECONDS):
        first = started(group_commit, 1, 2, seconds=2.0)
        await asyncio.sleep(0.6)  # of the two seconds; the leader waits for one
        late = started(group_commit, 3, 4, seconds=2.0)
        await asyncio.sleep(0)

    assert await asyncio.gather(*first, *late) == [True] * 4
    transactions = "SELECT array_agg(id) FROM stored GROUP BY xmin::text ORDER BY min(id)"
    assert [sorted(ids) for (ids,) in await database.fetch(transactions)] == [[1, 2], [3, 4]]


@pytest.fixture
async def storage(pool, statements):
    """A storage whose statements are already prepared, on its only connection."""
    opened = Storage(pool, RelayWaker(pool, seconds=2 * SECONDS), seconds=2 * SECONDS)
    for _ in range(2):
        await store(opened, "the first")
    statements.clear()
    return opened


async def store(storage: Storage, key: str | None, *, sha256: bytes = BODY, **firm: str) -> Outcome:
    return await storage.store(
        replace(stored.new_request(), **firm),
        idempotency=None if key is None else Idempotency(key, sha256),
        traceparent=None,
        until=time.monotonic() + 2 * SECONDS,
    )


async def store_all(storage: Storage, *keys: str | None) -> list[Outcome]:
    """Store a request with each key in the same turn of the event loop: in one group."""
    return await asyncio.gather(*(store(storage, key) for key in keys))


async def stored_keys(database: Connection) -> list[str]:
    """Return the keys with which requests are stored, once for each event."""
    ours = "calculation_request.id = request_id AND idempotency_key <> 'the first'"
    rows = await database.fetch(f"SELECT idempotency_key FROM calculation_request JOIN outbox ON {ours}")  # noqa: S608
    return sorted(key for (key,) in rows)


async def test_repeats_and_a_reused_key_in_one_group_get_their_answers(storage, database, statements):
    before, _ = await store(storage, "old")
    statements.clear()

    of_one_group = asyncio.gather(*(store(storage, key) for key in ("old", "k", "k", "other", None)))
    reused = asyncio.create_task(store(storage, "k", sha256=OTHER_BODY))
    old, first, again, *others = await of_one_group

    with pytest.raises(IdempotencyKeyReused):
        await reused
    assert statements.round_trips == 1 + 3, "one for the group, and one for each that looks for its key"
    assert (old, again) == ((before, True), (first[0], True))
    assert [is_repeat for _, is_repeat in (first, *others)] == [False] * 3
    assert await stored_keys(database) == ["k", "old", "other"]


@pytest.mark.parametrize("is_committed", [True, False])
async def test_key_in_use_delays_no_other(storage, database_url, database, statements, is_committed):
    """There is one connection: the others would wait if a create waited for its key inside Postgres."""
    async with stored.holding(database_url, Idempotency("held", BODY)) as holder:
        waiting = asyncio.gather(*(store(storage, "held") for _ in range(12)))
        await store_all(storage, "in the same group", None)
        await eventually(lambda: len(statements.executed) >= 3 * 2 * 12)  # each has tried three times
        for number in range(3):
            await store_all(storage, f"key {number}", None)
        # Another firm may use the same key.
        assert not (await store(storage, "held", conveyancer_id=FREE_CONVEYANCER))[1]
        assert not waiting.done()
        await (holder.commit() if is_committed else holder.rollback())

        outcomes = await waiting

    assert sorted(is_repeat for _, is_repeat in outcomes) == [is_committed, *[True] * 11]
    assert len({request.id for request, _ in outcomes}) == 1
    assert (await stored_keys(database)).count("held") == 2


async def test_request_that_is_being_updated_delays_neither_its_repeat_nor_other_creates(storage, database):
    """As the worker updates it. An INSERT with ON CONFLICT would wait for that transaction."""
    before, _ = await store(storage, "old")

    async with asyncio.timeout(SECONDS), database.transaction():
        await database.execute("UPDATE calculation_request SET sequence = 2 WHERE id = $1", before.id)
        outcomes = await store_all(storage, "old", "new", None)

    assert outcomes[0] == (before, True)
    assert [is_repeat for _, is_repeat in outcomes] == [True, False, False]


async def test_groups_with_keys_in_opposite_orders_do_not_deadlock(storage, service_settings, database):
    await database.execute(
        """
        CREATE SEQUENCE stored_with_key;
        CREATE FUNCTION take_long() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
            BEGIN PERFORM nextval('stored_with_key'), pg_sleep(0.3); RETURN NULL; END $$;
        CREATE TRIGGER take_long AFTER INSERT ON calculation_request
            FOR EACH ROW WHEN (NEW.idempotency_key IS NOT NULL) EXECUTE FUNCTION take_long();
        """
    )
    async with open_pool(service_settings) as pool:
        another = Storage(pool, RelayWaker(pool, seconds=SECONDS), seconds=2 * SECONDS)
        await store(another, None)  # connects
        a_b, b_a = await asyncio.gather(store_all(storage, "a", "b"), store_all(another, "b", "a"))

    assert [request.id for request, _ in a_b] == [request.id for request, _ in reversed(b_a)]
    assert sorted(is_repeat for _, is_repeat in a_b + b_a) == [False, False, True, True]
    assert await stored_keys(database) == ["a", "b"]
    # After a deadlock, a group that was rolled back would have stored its first key again.
    assert await database.fetchval("SELECT last_value FROM stored_with_key") == 2


async def test_group_whose_answer_is_lost_is_stored_once_however_often_it_is_sent(storage, link, database):
    keys = "abcde"
    creates = asyncio.gather(*(store(storage, key) for key in keys), return_exceptions=True)
    await link.swallow_answers_and_cut(0.3)

    assert [type(outcome) for outcome in await creates] == [PostgresUnavailable] * len(keys)
    assert await stored_keys(database) == [*keys]
    again = await store_all(storage, *keys, *keys)
    assert {is_repeat for _, is_repeat in again} == {True}
