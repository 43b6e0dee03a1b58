"""The worker's metrics, and the reconciliation that sets some of them every few minutes."""

import asyncio
import math
from functools import partial
from itertools import pairwise

import pytest

from tests.harness.databases import has_waiting_statement
from tests.harness.in_process import running
from tests.harness.metrics import rises, value
from tests.harness.waiting import eventually
from tests.worker.conftest import announce_next, created_body, hold_events, publish, store
from tests.worker.steps import intend
from worker import process, reconciliation
from worker.consumers import notifications
from worker.mail import ledger
from worker.rabbitmq.topology import NOTIFICATIONS
from worker.relay import pointers


async def test_events_by_state_and_pending_emails_are_counted_with_the_age_of_the_oldest_but_in_an_outage(
    database, linked_pool, link
):
    readings = [pointers.read_gauges, ledger.read_gauges]
    read_gauges = partial(process.read_gauges, linked_pool, readings, seconds=10.0)
    request, *_ = [await store(database) for _ in range(3)]
    await announce_next(database, request.id)
    await hold_events(database, request.id)
    await intend(database, request)
    await database.execute("UPDATE outbox SET created_at = now() - interval '90 seconds'")
    await database.execute("UPDATE email SET created_at = now() - interval '90 seconds'")

    await read_gauges()

    counted = ("outbox_pending_events", "outbox_retrying_events", "emails_pending")
    assert [value(name) for name in counted] == [2, 1, 1]
    for age in ("outbox_oldest_event_age_seconds", "emails_oldest_pending_age_seconds"):
        assert 90 <= value(age) < 120

    await database.execute("DELETE FROM outbox")
    await read_gauges()
    assert (value("outbox_pending_events"), value("outbox_oldest_event_age_seconds")) == (0, 0)

    with rises("postgres_unavailable_total"):
        await link.refuse()
        await read_gauges()
    assert math.isnan(value("outbox_pending_events"))
    assert math.isnan(value("outbox_oldest_event_age_seconds"))


async def test_feed_is_held_back_for_as_long_as_an_older_transaction_is_open(database, other_connection):
    async with other_connection.transaction():
        await other_connection.execute("SELECT pg_current_xact_id()")
        await pointers.read_gauges(database)
        assert value("feed_held_back_seconds") == 0
        await store(database)
        await database.execute("UPDATE event SET time = now() - interval '90 seconds'")
        await pointers.read_gauges(database)

    assert 90 <= value("feed_held_back_seconds") < 120


async def test_relay_counts_confirmed_events_by_type_and_no_returned_one(database, relay, publisher, channel):
    await channel.queue_delete(NOTIFICATIONS.name)
    for event_type in ("request.created", "request.email_sent", "request.mystery"):
        request = await store(database)
        await database.execute("UPDATE event SET type = $2 WHERE request_id = $1", request.id, event_type)

    with (
        rises("relay_events_published_total", type="request.created", by=0),
        rises("relay_events_published_total", type="request.email_sent"),
        rises("relay_events_published_total", type="request.mystery"),
        rises("relay_delivery_seconds_count", by=2),
    ):
        await relay.relay_due(publisher)


async def test_consumer_counts_messages_by_outcome(worker_settings, pool, channel, stored_request):
    consumer = notifications.consumer(worker_settings, pool, asyncio.Event())
    queue = {"queue": NOTIFICATIONS.name}
    settled = value("consumer_message_seconds_count", **queue)
    with (
        rises("consumer_messages_total", queue=NOTIFICATIONS.name, outcome="handled"),
        rises("consumer_messages_total", queue=NOTIFICATIONS.name, outcome="dead_lettered"),
        rises("consumer_messages_total", queue=NOTIFICATIONS.name, outcome="returned", by=0),
    ):
        async with running(consumer.run):
            await eventually(lambda: value("consumer_reading", **queue) == 1)
            await publish(channel, NOTIFICATIONS, created_body(stored_request))
            await publish(channel, NOTIFICATIONS, b"not an event")
            await eventually(lambda: value("consumer_message_seconds_count", **queue) == settled + 2)
    assert value("consumer_reading", **queue) == 0


@pytest.mark.usefixtures("stored_request")
async def test_discrepancies_of_the_last_day_are_exported(database, pool):
    await database.execute("DELETE FROM outbox")
    await database.execute("UPDATE calculation_request SET created_at = now() - interval '1 hour'")

    await reconciliation.look(pool)

    kinds = ("request_without_email", "event_overdue")
    assert [value("reconciliation_discrepancies", kind=kind) for kind in kinds] == [1, 0]
    assert 0 <= value("reconciliation_age_seconds") < 60

    await database.execute("UPDATE calculation_request SET created_at = now() - interval '25 hours'")
    await reconciliation.look(pool)

    assert value("reconciliation_discrepancies", kind="request_without_email") == 0


async def test_reconciliation_repeats_until_it_is_stopped_even_during_a_look(pool, database, monkeypatch):
    monkeypatch.setattr(reconciliation, "INTERVAL_SECONDS", 0.01)
    ages = [math.inf]

    def has_looked_four_times() -> bool:
        ages.append(value("reconciliation_age_seconds"))
        return sum(later < earlier for earlier, later in pairwise(ages)) == 4

    async with asyncio.timeout(30), database.transaction(), running(partial(reconciliation.run, pool)):
        await eventually(has_looked_four_times)
        await database.execute("LOCK TABLE calculation_request")
        await eventually(lambda: has_waiting_statement(database))
