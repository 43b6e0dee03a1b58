"""What commands that change something have in common: on record, once, harmless when repeated or cut off."""

import asyncio
import json
import os
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import pytest
from aio_pika.abc import AbstractChannel

from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from tests.deploy.pages import OPERATING, section
from tests.harness import databases
from tests.harness.databases import count_waiting_statements
from tests.harness.examples import CONVEYANCER
from tests.harness.queues import count
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import COMMANDS, command
from tests.worker.conftest import created_body
from tests.worker.steps import bury, intend, store_many
from worker.rabbitmq.topology import NOTIFICATIONS

pytestmark = pytest.mark.usefixtures("on_servers")

RECORDS = "SELECT action, operator, note FROM operator_action"
BY = ("--by", "Ada", "--note", "a test")
ON_RECORD = {
    " ".join(words[1:])
    for words, found in COMMANDS.items()
    if any(parameter.name == "by" for parameter in found.params)
}


class Changing(NamedTuple):
    """A command that changes something, and a count of what it has changed."""

    action: str  # its words, as they stand on record
    options: str
    done: str  # counts in Postgres, or is the name of a queue
    changes: int = 1
    records: tuple[int, int] = (1, 1)  # of one operator, and of two
    table: str = "calculation_request"  # whose rows it locks, if any
    marker: bytes = b"INSERT INTO operator_action"  # is executed while they are locked, if at all
    emails: int = 0  # how many of the requests' e-mails are recorded before
    prepare: str = "SELECT"  # a statement that is executed before

    async def has_done(self, changes: int, database: Connection, channel: AbstractChannel) -> bool:
        """Whether it has made so many changes. Letters that a command has held return a little later."""
        if self.done in (QUEUE, DEAD):
            messages = await count(channel, self.done)
            return changes == (messages if self.done == QUEUE else 3 - messages)
        number: int = await database.fetchval(f"SELECT count(*) FROM {self.done}")  # noqa: S608
        return changes == number


QUEUE, DEAD = NOTIFICATIONS.name, NOTIFICATIONS.dead_letters
PENDING, CANCELLED = "email WHERE state = 'pending'", "email WHERE reason = 'cancelled'"
CORRECTED = "calculation_request WHERE customer_email = 'eve@example.com'"
DISABLED = "conveyancer WHERE disabled_at IS NOT NULL"
ENABLED = f"conveyancer WHERE id = '{CONVEYANCER}' AND disabled_at IS NULL"
FAIL = "UPDATE email SET state = 'failed', smtp_code = 550, reason = 'refused', settled_at = created_at"
DISABLE = "UPDATE conveyancer SET disabled_at = now()"
FIRM: dict[str, Any] = {"table": "conveyancer"}
CHANGING = [
    Changing("outbox replay", "--from 2020-01-01", "outbox", 3, (1, 2), marker=b"INSERT INTO outbox"),
    Changing("emails resend", "--reply 550", PENDING, 3, (3, 3), emails=3, prepare=FAIL),
    # The e-mails of two requests have not begun.
    Changing("emails cancel", f"--conveyancer {CONVEYANCER}", CANCELLED, 3, (3, 3), emails=1),
    Changing("dead-letters redrive", QUEUE, QUEUE, 3, (1, 2), table=""),
    Changing("dead-letters discard", f"{QUEUE} --message-id {{uuid}}", DEAD, 1, (1, 2), table=""),
    Changing("request correct", "{uuid} --customer-email eve@example.com", CORRECTED),
    Changing("request new-secret", "{uuid}", PENDING, 1, (1, 2)),
    Changing("request erase", "{uuid}", "erased_request"),
    Changing("conveyancer add", f"{CONVEYANCER} --name New", "conveyancer WHERE name = 'New'", **FIRM),
    Changing("conveyancer disable", CONVEYANCER, DISABLED, 1, (1, 2), **FIRM),
    Changing("conveyancer enable", CONVEYANCER, ENABLED, 1, (1, 2), **FIRM, prepare=DISABLE),
]


@pytest.fixture(params=CHANGING, ids=lambda each: each.action)
async def changing(request):
    return request.param


@pytest.fixture
async def words(database, channel, changing):
    """The command, for three requests whose events have been published, and dead-lettered."""
    requests = await store_many(database, 3)
    for request in requests:
        await bury(channel, NOTIFICATIONS, created_body(request), message_id=request.uuid)
    for request in requests[: changing.emails]:
        await intend(database, request)
    await database.execute(changing.prepare)
    return [*changing.action.split(), *changing.options.format(uuid=requests[0].uuid).split(), *BY]


def test_every_command_on_record_is_here_and_the_page_says_whether_to_repeat_it_after_a_restore():
    here = {each.action for each in CHANGING}
    step = section(OPERATING, "Backup and restore").partition("\n6. ")[2].partition("\n7. ")[0]

    assert here | {"api-key create", "api-key revoke"} == ON_RECORD, "tests/service has the keys"
    assert {command for command in ON_RECORD if command not in step} == set()


async def test_change_is_on_record_and_a_repeat_changes_nothing(words, changing, database, channel, capsys):
    await command(*words)
    recorded = await database.fetch(RECORDS)
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    await eventually(lambda: changing.has_done(changing.changes, database, channel))
    await command(*words)

    await eventually(lambda: changing.has_done(changing.changes, database, channel))
    assert recorded == [(changing.action, "Ada", "a test")] * changing.records[0]
    named = [(line["action"], line["operator"], line["note"]) for line in logged]
    assert ({line["event"] for line in logged}, named) == ({"operator_acted"}, recorded)


async def test_two_operators_make_each_change_once(words, changing, database, channel, other_connection):
    async def both_wait() -> bool:
        return await count_waiting_statements(other_connection) == 2

    async with database.transaction():
        if changing.table:
            await database.execute(f"SELECT FROM {changing.table} FOR UPDATE")
        both = [asyncio.create_task(command(*words)) for _ in range(2)]
        if changing.table:
            await eventually(both_wait)
    ended = await asyncio.gather(*both, return_exceptions=True)

    # Of dead letters that the other holds, one that cannot wait for locks does not see the end.
    failures = [str(each) for each in ended if isinstance(each, BaseException)]
    assert all(not changing.table and "did not arrive. Run it again." in each for each in failures)
    await eventually(lambda: changing.has_done(changing.changes, database, channel))
    assert len(await database.fetch(RECORDS)) == changing.records[1]


async def test_vanished_operator_leaves_no_lock(words, changing, database, channel, link, monkeypatch):
    """For instance with its machine: TCP would notice after two hours."""
    monkeypatch.setattr(connections, "SILENCE_SECONDS", 1.0)
    table = changing.table or "calculation_request"
    everything = await database.fetch(f"TABLE {table}")
    link.hold_before(changing.marker)
    with patch.dict(os.environ, DATABASE_URL=databases.as_role(link.url, "operator")):
        cut_off = asyncio.create_task(command(*words))
        await eventually(link.marker_reached.is_set)

    async def is_free() -> bool:
        rows = await database.fetch(f"SELECT FROM {table} FOR UPDATE SKIP LOCKED")
        return len(rows) == len(everything)

    was_free = await is_free()
    await eventually(is_free)
    await link.cut()
    with pytest.raises((PostgresUnavailable, click.ClickException)):
        await cut_off
    unchanged = await database.fetch(f"TABLE {table}") == everything
    await eventually(lambda: changing.has_done(0, database, channel))
    recorded = await database.fetch(RECORDS)
    await command(*words)

    assert (was_free, unchanged) == (not changing.table, True)
    await eventually(lambda: changing.has_done(changing.changes, database, channel))
    # A replay is recorded before it begins.
    assert len(recorded) == (1 if changing.marker == b"INSERT INTO outbox" else 0)
