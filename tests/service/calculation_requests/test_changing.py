"""Requests: their fields are declared wherever they are needed, and change in one way, which is announced."""

import re
from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from service import app
from service.api.bodies import CreateBody
from service.calculation_requests import event_history, model
from service.calculation_requests.changing import change
from service.calculation_requests.model import FOR_CUSTOMER
from service.identifiers import new_request_id, parse_uuid, uuid_of
from service.outbox import events
from service.outbox.events import DetailedRequestEvent, RequestCreated
from tests.deploy.pages import API, section
from tests.harness import stored
from worker.relay import pointers

LATER = [event for event in events.SENT if event is not RequestCreated]
INTERNAL = {"id", "conveyancer_id", "sequence", "secret_salt", "secret_key_id"}
MADE = {"uuid", "secret", "request_url"}  # for the view, of the internal columns
SET_BY_THE_SERVICE = {"created_at", "updated_at", "calculation_id"}
SENT = CreateBody.__struct_fields__
COLUMNS = set(model.CalculationRequest.__struct_fields__)
SHOWN = model.RetrievedCalculationRequest.__struct_fields__


@pytest.fixture
async def request_(database):
    """A stored request."""
    request = stored.new_request(external_id="crm-17")
    await stored.insert(database, request)
    return request


def test_requests_are_changed_in_one_way():
    """Otherwise the feed could miss the change, or its event could have another's sequence."""
    changes = re.compile(r"UPDATE\s+calculation_request\b|INTO\s+event\b")
    files = [file for package in ("service", "worker") for file in (CHECKOUT / package).rglob("*.py")]

    assert {file.name for file in files if changes.search(file.read_text())} == {"storing.py", "changing.py"}


def test_uuids_have_a_fixed_width_and_sort_by_time():
    uuids = [uuid_of(new_request_id()) for _ in range(1000)]
    assert uuids == sorted(uuids)

    for number in (0, 1, 61, 62, 2**128 - 1):
        uuid = uuid_of(UUID(int=number))
        assert (len(uuid), parse_uuid(uuid)) == (26, UUID(int=number))
    assert parse_uuid("req_7n42DGM5Tflk9n8mt7Fhc8") is None, "one more than 128 bits can hold"


async def test_every_field_is_sent_stored_and_shown_in_one_order(database):
    assert COLUMNS - INTERNAL == {*SHOWN} - MADE == {*SENT} | SET_BY_THE_SERVICE
    assert [name for name in SHOWN if name in SENT] == [*SENT]
    assert set(FOR_CUSTOMER) <= COLUMNS - INTERNAL
    columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 'calculation_request'"
    in_table = {name for (name,) in await database.fetch(columns)}
    not_read = {"idempotency_key", "idempotency_sha256", "refused_calculation_id", "withdrawn_at"}
    assert in_table ^ COLUMNS == not_read
    in_one_alone = {*model.EventSource.__struct_fields__} ^ {*DetailedRequestEvent.__struct_fields__}
    assert in_one_alone & {*SENT} == set(), "EventSource in model.py, DetailedRequestEvent in events.py"


def test_pages_name_every_field_that_is_the_firms_alone():
    retrieve = app.describe()["paths"]["/v1/request/{uuid}"]["get"]["description"]

    for text in (section(API, "Tokens"), retrieve):
        not_named = {*SENT} - {*FOR_CUSTOMER} - set(re.findall(r"`(\w+)`", text))
        assert not not_named, "name it, or make it ForCustomer[…] in model.py if the customer may see it"


async def test_change_that_the_firm_can_see_moves_updated_at_forward_and_no_other_does(database, request_):
    long_ago, later = datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
    set_updated = "UPDATE calculation_request SET updated_at = $1"
    updated = "SELECT updated_at FROM calculation_request"

    await database.execute(set_updated, long_ago)
    async with database.transaction(), change(database, request_.id) as changed:
        changed.announce(RequestCreated)
        changed.refused_calculation_id = "C-2"
    assert await database.fetchval(updated) == long_ago
    async with database.transaction(), change(database, request_.id) as changed:
        changed.customer_email = "eve@customer.example.com"
        changed.announce(RequestCreated)
    announced_at = await database.fetchval("SELECT time FROM event WHERE sequence = 3")
    assert await database.fetchval(updated) == announced_at > long_ago
    await database.execute(set_updated, later)
    async with database.transaction(), change(database, request_.id) as changed:
        changed.calculation_id = "C-1"

    row = await database.fetchrow("SELECT updated_at, customer_email, sequence FROM calculation_request")
    assert row == (later, "eve@customer.example.com", 3)


@pytest.mark.parametrize("event", LATER, ids=lambda event: event.type)
async def test_every_event_is_kept_and_shown_as_it_is_sent(database, request_, event):
    async with database.transaction(), change(database, request_.id) as changed:
        changed.announce(event, **stored.own_examples(event))

    async with database.transaction():
        sent = []
        while locked := await pointers.lock(database, pending=9, held=9):
            sent += [each.payload for each in locked]
            await pointers.delete(database, locked)
    shown = await event_history.read(database, request_.id)

    assert [each.type for each in shown.events] == [RequestCreated.type, event.type]
    assert [msgspec.json.encode(each) for each in shown.events] == sent
