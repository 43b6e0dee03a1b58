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

BY = ("--by", "Ada", "--note", "a test")


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

    async def count_done(self, database: Connection, channel: AbstractChannel) -> int:
        if self.done == NOTIFICATIONS.name:
            return await count(channel, self.done)
        if self.done == NOTIFICATIONS.dead_letters:
            return 3 - await count(channel, self.done)
        number: int = await database.fetchval(f"SELECT count(*) FROM {self.done}")  # noqa: S608
        return number


FAILED = "UPDATE email SET state = 'failed', smtp_code = 550, reason = 'refused', settled_at = created_at"
DISABLED = "UPDATE conveyancer SET disabled_at = now()"
ENABLED = f"conveyancer WHERE id = '{CONVEYANCER}' AND disabled_at IS NULL"
THREE_EVENTS: dict[str, Any] = {"changes": 3, "records": (1, 2), "marker": b"INSERT INTO outbox"}
THREE_EACH: dict[str, Any] = {"changes": 3, "records": (3, 3)}
FIRM: dict[str, Any] = {"records": (1, 2), "table": "conveyancer"}
CHANGING = [
    Changing("outbox replay", "--from 2020-01-01", "outbox", **THREE_EVENTS),
    Changing(
        *("emails resend", "--reply 550", "email WHERE state = 'pending'"),
        **THREE_EACH,
        emails=3,
        prepare=FAILED,
    ),
    Changing(
        *("emails cancel", f"--conveyancer {CONVEYANCER}", "email WHERE reason = 'cancelled'"),
        **THREE_EACH,
        emails=1,  # Those of the others have not begun.
    ),
    Changing(
        *("dead-letters redrive", NOTIFICATIONS.name, NOTIFICATIONS.name),
        changes=3,
        records=(1, 2),
        table="",
    ),
    Changing(
        *("dead-letters discard", f"{NOTIFICATIONS.name} --message-id {{uuid}}", NOTIFICATIONS.dead_letters),
        records=(1, 2),
        table="",
    ),
    Changing(
        *("request correct", "{uuid} --customer-email eve@example.com"),
        "calculation_request WHERE customer_email = 'eve@example.com'",
    ),
    Changing("request new-secret", "{uuid}", "email WHERE state = 'pending'", records=(1, 2)),
    Changing("request erase", "{uuid}", "erased_request"),
    Changing(
        *("conveyancer add", f"{CONVEYANCER} --name New", "conveyancer WHERE name = 'New'"),
        table="conveyancer",
    ),
    Changing("conveyancer disable", CONVEYANCER, "conveyancer WHERE disabled_at IS NOT NULL", **FIRM),
    Changing("conveyancer enable", CONVEYANCER, ENABLED, **FIRM, prepare=DISABLED),
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


async def records(database: Connection) -> Any:
    return await database.fetch("SELECT action, operator, note FROM operator_action")


def having(option: str) -> set[str]:
    return {
        " ".join(words[1:])
        for words, found in COMMANDS.items()
        if any(parameter.name == option for parameter in found.params)
    }


def test_every_command_that_is_on_record_is_here():
    here = {each.action for each in CHANGING}

    assert here | {"api-key create", "api-key revoke"} == having("by"), "tests/service has the keys"


def test_page_says_of_every_command_whether_to_repeat_it_after_a_restore():
    step = section(OPERATING, "Backup and restore").partition("\n6. ")[2].partition("\n7. ")[0]

    assert {command for command in having("by") if command not in step} == set()


async def test_change_is_on_record_and_a_repeat_changes_nothing(words, changing, database, channel, capsys):
    await command(*words)
    done, recorded = await changing.count_done(database, channel), await records(database)
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    await command(*words)

    assert done == await changing.count_done(database, channel) == changing.changes
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
    assert await changing.count_done(database, channel) == changing.changes
    assert len(await records(database)) == changing.records[1]


async def test_operator_who_vanishes_leaves_no_lock_and_nothing_half_done(
    *, words, changing, database, channel, link, monkeypatch
):
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
    done, recorded = await changing.count_done(database, channel), await records(database)
    await command(*words)

    assert was_free is not bool(changing.table)
    assert unchanged
    assert (done, await changing.count_done(database, channel)) == (0, changing.changes)
    # A replay is recorded before it begins.
    assert len(recorded) == (1 if changing.marker == b"INSERT INTO outbox" else 0)


async def test_standby_refuses_a_change_in_a_line(words):
    os.environ["DATABASE_URL"] += "?default_transaction_read_only=on"

    with pytest.raises(PostgresUnavailable, match="takes no writes: is it a standby"):
        await command(*words)
