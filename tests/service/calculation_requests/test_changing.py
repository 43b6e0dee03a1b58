"""Changes of requests: made in one way, announced, and recorded."""

import re
from datetime import UTC, datetime

import asyncpg
import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.calculation_requests import event_history
from service.calculation_requests.changing import change, change_all
from service.outbox import asyncapi, events
from service.outbox.events import DetailedRequestEvent, RequestCreated
from tests.deploy.pages import WORKER, section
from tests.harness import stored
from worker.relay import pointers

LATER = [event for event in events.SENT if event is not RequestCreated]


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
    changing_files = {file.name for file in files if changes.search(file.read_text())}
    assert changing_files == {"storing.py", "changing.py"}


async def test_change_that_the_firm_can_see_moves_updated_at_and_no_other_does(database, request_):
    long_ago = datetime(2000, 1, 1, tzinfo=UTC)
    await database.execute("UPDATE calculation_request SET updated_at = $1", long_ago)
    updated = "SELECT updated_at FROM calculation_request"

    async with database.transaction(), change(database, request_.id) as changed:
        changed.announce(RequestCreated)
        changed.refused_calculation_id = "C-2"
    assert await database.fetchval(updated) == long_ago
    async with database.transaction(), change(database, request_.id) as changed:
        changed.customer_email = "eve@customer.example.com"
        changed.announce(RequestCreated)

    row = await database.fetchrow("SELECT updated_at, customer_email, sequence FROM calculation_request")
    assert (
        row["updated_at"] == await database.fetchval("SELECT time FROM event WHERE sequence = 3") > long_ago
    )
    assert (row["customer_email"], row["sequence"]) == ("eve@customer.example.com", 3)


async def test_later_change_is_not_before_an_earlier_one(database, request_):
    later = datetime(2100, 1, 1, tzinfo=UTC)
    await database.execute("UPDATE calculation_request SET updated_at = $1", later)

    async with database.transaction(), change(database, request_.id) as changed:
        changed.calculation_id = "C-1"

    assert await database.fetchval("SELECT updated_at FROM calculation_request") == later


async def test_requests_of_one_change_may_have_different_columns_set(database):
    requests = [stored.new_request() for _ in range(3)]
    for request in requests:
        await stored.insert(database, request)
    first, second, third = (request.id for request in requests)

    async with database.transaction(), change_all(database, [first, second, third]) as found:
        found[first].calculation_id = "C-1"
        found[second].secret_salt = b"salt"
        found[third].announce(RequestCreated)

    columns = "calculation_id, secret_salt = 'salt', sequence"
    rows = await database.fetch(f"SELECT {columns} FROM calculation_request ORDER BY id")  # noqa: S608
    assert rows == [("C-1", False, 1), (None, True, 1), (None, False, 2)]


async def test_two_changes_in_one_transaction_cannot_announce_the_same_sequence(database, request_):
    async def announce_twice() -> None:
        async with (
            database.transaction(),
            change(database, request_.id) as outer,
            change(database, request_.id) as inner,
        ):
            outer.announce(RequestCreated)
            inner.announce(RequestCreated)

    with pytest.raises(asyncpg.UniqueViolationError):
        await announce_twice()


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


@pytest.mark.parametrize("event", events.SENT, ids=lambda event: event.type)
def test_event_is_documented(event):
    """Each of its fields has an example, and the page names it."""
    own = set(event.__struct_fields__) - set(DetailedRequestEvent.__struct_fields__)
    row = re.search(rf"^\| `{event.type}` \|.*$", section(WORKER, "Events"), re.MULTILINE)

    without = set(event.__struct_fields__) - {*asyncapi.examples_in(event), "sequence"}
    assert without == set(), "without an example in events.py"
    assert row, "worker/README.md, Events"
    assert own <= set(re.findall(r"`(\w+)`", row[0]))


def test_fields_of_all_events_are_documented():
    page = section(WORKER, "Events")
    (named,) = re.findall(r"`data` holds (.*?), and nothing personal", page, re.DOTALL)

    assert re.findall(r"`(\w+)`", named) == list(DetailedRequestEvent.__struct_fields__), (
        "worker/README.md, Events"
    )


def test_page_shows_an_event_as_it_is_sent():
    (shown,) = re.findall("```json\n(.*?)```", section(WORKER, "Events"), re.DOTALL)

    (created,) = (each for each in asyncapi.SENT_EXAMPLES if isinstance(each, RequestCreated))
    assert msgspec.json.decode(shown)["data"] == msgspec.to_builtins(created), "worker/README.md, Events"
