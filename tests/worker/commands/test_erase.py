"""`request erase`: nothing personal is left in Postgres, and nothing else changes."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import click
import msgspec
import pytest

from service.api.request_body import CreateBody
from service.calculation_requests.model import CalculationRequest, RequestErased
from service.commands.requests import Erasure
from service.every_firm import operator_actions
from service.outbox import lanes
from service.outbox.events import CalculationCreated
from service.postgres import connections
from service.postgres.pool import Connection
from tests.harness.databases import has_waiting_statement
from tests.harness.waiting import eventually
from tests.worker import deliveries
from tests.worker.commands.conftest import command
from tests.worker.commands.steps import assert_sound, attempt_emails, calculate, intend, key_of, states
from tests.worker.conftest import created_event, hold_events, store
from worker.settings import WorkerSettings

MARK = "Xq7personal"
MARKED: dict[str, Any] = {
    "customer_email": f"{MARK}@customer.example.com",
    "customer_phone": MARK,
    "customer_first_name": MARK,
    "customer_last_name": MARK,
    "sender_email": f"{MARK}@firm.example.com",
    "sender_organization_name": MARK,
    "sender_first_name": MARK,
    "sender_last_name": MARK,
    "case_ref": MARK,
    "notes": MARK,
    "external_id": MARK,
    "meta_data": json.dumps({"of": MARK}),
    "calculation_fee_exempt": True,
    "calculation_fee_exempt_reason": MARK,
}


async def erase(settings: WorkerSettings, request: CalculationRequest, *words: str) -> Erasure:
    """Return the answer of `request erase`."""
    erasure: Erasure = (await command(settings, "request", "erase", request.uuid, *words)).data
    return erasure


async def dump(database: Connection) -> str:
    """Return every row of every table, as text."""
    tables = await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
    assert len(tables) >= 9
    rows = [
        row[0]
        for table in tables
        for row in await database.fetch(f"SELECT t::text FROM {table['tablename']} AS t")  # noqa: S608
    ]
    payloads = await database.fetch("SELECT payload FROM outbox UNION ALL SELECT payload FROM outbox_held")
    return "\n".join([*rows, *(row["payload"].decode() for row in payloads)])


async def unpublished(database: Connection) -> Sequence[dict[str, Any]]:
    """Return the unpublished events, in order."""
    rows = await database.fetch(
        "SELECT id, payload FROM outbox UNION ALL SELECT id, payload FROM outbox_held ORDER BY id"
    )
    return [json.loads(row["payload"]) for row in rows]


def test_every_field_that_may_be_personal_is_marked():
    sent = {field.name for field in msgspec.structs.fields(CreateBody)}

    assert sent - MARKED.keys() == {"property_value", "request_type"}


async def test_nothing_personal_is_left_in_any_table(worker_settings, database, postman, mail_server):
    await store(database, external_id="another-case")
    request = await store(database, **MARKED)
    await database.execute(
        "UPDATE calculation_request SET idempotency_key = $2, idempotency_sha256 = $3 WHERE id = $1",
        request.id,
        f"of {MARK}",
        MARK.encode(),
    )
    await hold_events(database, request.id)
    mail_server.rcpt_reply = f"450 4.2.1 <{MARK}@customer.example.com> try later"
    await intend(database, request)
    await attempt_emails(database, postman)
    await calculate(database, request)
    assert MARK in await dump(database)
    assert MARK.encode().hex() in await dump(database)
    before = await unpublished(database)

    done = await erase(worker_settings, request, "--by", "Ada", "--note", "asked for it")
    again = await erase(worker_settings, request)

    assert done == Erasure(request.uuid, was_erased_before=False)
    assert again == Erasure(request.uuid, was_erased_before=True)
    left = await dump(database)
    assert MARK not in left
    assert MARK.encode().hex() not in left
    after = await unpublished(database)
    assert [event["data"].pop("external_id") for event in after] == ["another-case", None, None, None]
    assert [event["data"].pop("external_id") for event in before] == ["another-case", MARK, MARK]
    assert after[:-1] == before
    assert (after[-1]["type"], after[-1]["data"]["reason"]) == ("request.email_failed", "cancelled")
    assert await states(database) == {key_of(request): "failed"}
    [action] = await operator_actions.read(database, request.id)
    assert (action.action, action.operator, action.note) == ("request erase", "Ada", "asked for it")
    await assert_sound(database)


async def test_late_messages_about_an_erased_request_change_nothing(
    worker_settings, database, pool, stored_request
):
    await erase(worker_settings, stored_request)
    before = await dump(database)

    with pytest.raises(RequestErased):
        await deliveries.record_result(CalculationCreated(stored_request.uuid, "C-1"), pool=pool)
    await deliveries.intend_email(created_event(stored_request), pool=pool)

    assert await dump(database) == before


async def test_locked_row_is_named_soon_and_does_not_hold_its_lane(
    worker_settings, database, stored_request, monkeypatch
):
    monkeypatch.setattr(connections, "LOCK_SECONDS", 0.2)
    async with database.transaction():
        await database.execute("SELECT FROM calculation_request FOR UPDATE")
        async with asyncio.timeout(10.0):
            with pytest.raises(click.ClickException, match="holds a lock"):
                await erase(worker_settings, stored_request)
        assert await lanes.try_lock(database, [lanes.lane_of(stored_request.id)])


async def test_lane_held_by_a_relay_is_waited_for(worker_settings, database, stored_request):
    async with database.transaction():
        assert await lanes.try_lock(database, [lanes.lane_of(stored_request.id)])
        erasing = asyncio.create_task(erase(worker_settings, stored_request))
        await eventually(lambda: has_waiting_statement(database))
        assert not erasing.done()

    assert not (await erasing).was_erased_before
