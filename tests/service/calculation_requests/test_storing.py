"""Creates with idempotency keys, stored in groups: each key is used once, and delays no other create."""

import asyncio
import time

import msgspec
import pytest

from service.calculation_requests.model import (
    CalculationRequest,
    Idempotency,
    IdempotencyKeyReused,
)
from service.calculation_requests.storing import Storage
from service.outbox.waking import RelayWaker
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, open_pool
from tests.harness import stored
from tests.harness.examples import FREE_CONVEYANCER
from tests.harness.waiting import eventually

SECONDS = 10.0
BODY, OTHER_BODY = b"a" * 32, b"b" * 32  # the SHA-256 of each


@pytest.fixture
async def storage(pool, statements):
    """A storage whose statements are already prepared, on its only connection."""
    opened = Storage(pool, RelayWaker(pool, seconds=SECONDS), seconds=SECONDS)
    for _ in range(2):
        await store(opened, "the first")
    statements.clear()
    return opened


async def store(
    storage: Storage, key: str | None, *, sha256: bytes = BODY, seconds: float = SECONDS
) -> tuple[CalculationRequest, bool]:
    return await storage.store(
        stored.new_request(),
        idempotency=None if key is None else Idempotency(key, sha256),
        traceparent=None,
        until=time.monotonic() + seconds,
    )


async def store_all(storage: Storage, *keys: str | None) -> list[tuple[CalculationRequest, bool]]:
    """Store a request with each key in the same turn of the event loop: in one group."""
    return await asyncio.gather(*(store(storage, key) for key in keys))


async def stored_keys(database: Connection) -> list[str]:
    """Return the keys with which requests are stored, once for each event."""
    keyed = """
        SELECT idempotency_key
          FROM calculation_request
          JOIN outbox ON request_id = calculation_request.id
         WHERE idempotency_key <> 'the first'
        """
    return sorted(row["idempotency_key"] for row in await database.fetch(keyed))


async def test_repeats_and_a_reused_key_in_one_group_get_the_answers_that_they_would_get_alone(
    storage, database, statements
):
    before, _ = await store(storage, "old")
    statements.clear()

    of_one_group = asyncio.gather(*(store(storage, key) for key in ("old", "k", "k", "other", None)))
    reused = asyncio.create_task(store(storage, "k", sha256=OTHER_BODY))
    old, first, again, *others = await of_one_group

    with pytest.raises(IdempotencyKeyReused):
        await reused
    assert statements.round_trips == 1 + 3, "one for the group, and one for each that looks for its key"
    assert old == (before, True)
    assert again == (first[0], True)
    assert [is_repeat for _, is_repeat in (first, *others)] == [False] * 3
    assert await stored_keys(database) == ["k", "old", "other"]


async def test_twelve_creates_whose_key_is_in_use_elsewhere_delay_no_other(storage, database_url, statements):
    """There is one connection: the others would wait if a create waited for its key inside Postgres."""
    async with stored.holding(database_url, Idempotency("held", BODY)) as holder:
        waiting = asyncio.gather(*(store(storage, "held") for _ in range(12)))
        await store_all(storage, "in the same group", None)
        await eventually(lambda: len(statements.executed) >= 3 * 2 * 12)  # each has tried three times
        for number in range(3):
            await store_all(storage, f"key {number}", None)
        assert not waiting.done()
        await holder.commit()

        repeats = await waiting

    assert {is_repeat for _, is_repeat in repeats} == {True}
    assert len({request.id for request, _ in repeats}) == 1


async def test_create_whose_key_is_in_use_elsewhere_is_stored_when_that_fails(
    storage, database_url, database, statements
):
    async with stored.holding(database_url, Idempotency("held", BODY)) as holder:
        waiting = asyncio.gather(*(store(storage, "held") for _ in range(2)))
        await eventually(lambda: len(statements.executed) >= 2 * 2)  # Both have looked.
        await holder.rollback()

        outcomes = await waiting

    assert sorted(is_repeat for _, is_repeat in outcomes) == [False, True]
    assert await stored_keys(database) == ["held"]


async def test_key_that_another_firm_is_using_does_not_delay_a_create(storage, database_url):
    key = Idempotency("held", BODY)
    request = msgspec.structs.replace(stored.new_request(), conveyancer_id=FREE_CONVEYANCER)
    async with stored.holding(database_url, key):
        outcome = await storage.store(request, key, traceparent=None, until=time.monotonic() + SECONDS)

    assert outcome == (request, False)


async def test_request_that_is_being_updated_delays_neither_its_repeat_nor_other_creates(storage, database):
    """As the worker updates it. An INSERT with ON CONFLICT would wait for that transaction."""
    before, _ = await store(storage, "old")

    async with asyncio.timeout(SECONDS / 2), database.transaction():
        await database.execute("UPDATE calculation_request SET sequence = 2 WHERE id = $1", before.id)
        outcomes = await store_all(storage, "old", "new", None)

    assert outcomes[0] == (before, True)
    assert [is_repeat for _, is_repeat in outcomes] == [True, False, False]


async def test_groups_with_keys_in_opposite_orders_do_not_deadlock(storage, service_settings, database):
    await database.execute(
        """
        CREATE SEQUENCE stored_with_key;
        CREATE FUNCTION take_long() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
        BEGIN
            PERFORM nextval('stored_with_key'), pg_sleep(0.3);
            RETURN NULL;
        END $$;
        CREATE TRIGGER take_long AFTER INSERT ON calculation_request
            FOR EACH ROW WHEN (NEW.idempotency_key IS NOT NULL) EXECUTE FUNCTION take_long();
        """
    )
    async with open_pool(service_settings) as pool:
        another = Storage(pool, RelayWaker(pool, seconds=SECONDS), seconds=SECONDS)
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
