"""What commands that change something have in common: on record, once, harmless when repeated or cut off."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import click
import pytest
from aio_pika.abc import AbstractChannel

from service.calculation_requests.model import CalculationRequest
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from tests.harness.databases import count_waiting_statements
from tests.harness.examples import CONVEYANCER
from tests.harness.queues import count
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import COMMANDS, command
from tests.worker.commands.steps import bury, intend
from tests.worker.conftest import created_body, settings_with, store
from worker.rabbitmq.topology import NOTIFICATIONS

BY = ("--by", "Ada", "--note", "a test")


class World(NamedTuple):
    """Where a command changes something: three requests, whose events have been published."""

    database: Connection
    channel: AbstractChannel
    requests: list[CalculationRequest]


class Changing(NamedTuple):
    """A command that changes something, and a count of what it has changed."""

    action: str  # its words, as they stand on record
    options: str
    done: str  # counts in Postgres, or is the name of a queue
    prepare: Callable[[World], Awaitable[object]]
    changes: int = 1
    records: tuple[int, int] = (1, 1)  # of one operator, and of two
    table: str = "calculation_request"  # whose rows it locks, if any
    marker: bytes = b"INSERT INTO operator_action"  # is executed while they are locked, if at all

    def words(self, world: World) -> list[str]:
        """Return the command."""
        return [*self.action.split(), *self.options.format(uuid=world.requests[0].uuid).split(), *BY]

    async def count_done(self, world: World) -> int:
        """Return the number of changes."""
        if self.done == NOTIFICATIONS.name:
            return await count(world.channel, self.done)
        number: int = await world.database.fetchval(f"SELECT count(*) FROM {self.done}")  # noqa: S608
        return number


def executing(statement: str) -> Callable[[World], Awaitable[object]]:
    return lambda world: world.database.execute(statement)


async def fail_emails(world: World) -> None:
    for request in world.requests:
        await intend(world.database, request)
    await world.database.execute(
        """
        UPDATE email
           SET state = 'failed', smtp_code = 550, reason = 'refused', settled_at = now() - interval '1 s'
        """
    )


async def bury_all(world: World) -> None:
    for request in world.requests:
        key = f"{request.uuid}.request.created.1"
        await bury(world.channel, NOTIFICATIONS, created_body(request), message_id=key)


NOTHING = executing("SELECT")
OLD = executing("UPDATE calculation_request SET created_at = created_at - interval '1 h'")
ANNOUNCES: dict[str, Any] = {"changes": 3, "records": (1, 2), "marker": b"INSERT INTO outbox"}
CHANGING = [
    Changing("outbox replay", "--from 2020-01-01 --rate 1000", "outbox", NOTHING, **ANNOUNCES),
    Changing("reconcile --repair", "", "outbox", OLD, **ANNOUNCES),
    Changing(
        *("emails resend", "--code 550", "email WHERE state = 'pending'", fail_emails),
        changes=3,
        records=(3, 3),
    ),
    Changing(
        "emails cancel",
        f"--conveyancer {CONVEYANCER}",
        "email WHERE reason = 'cancelled'",
        lambda world: intend(world.database, world.requests[0]),  # Those of the others have not begun.
        changes=3,
        records=(3, 3),
    ),
    Changing(
        *("dead-letters redrive", NOTIFICATIONS.name, NOTIFICATIONS.name, bury_all),
        changes=3,
        records=(3, 3),
        table="",
    ),
    Changing(
        "request correct",
        "{uuid} --customer-email eve@example.com",
        "calculation_request WHERE customer_email = 'eve@example.com'",
        NOTHING,
    ),
    Changing("request new-secret", "{uuid}", "email WHERE state = 'pending'", NOTHING, records=(1, 2)),
    Changing("request erase", "{uuid}", "erased_request", NOTHING),
    Changing(
        *("conveyancer add", f"{CONVEYANCER} --name New", "conveyancer WHERE name = 'New'", NOTHING),
        table="conveyancer",
    ),
    Changing(
        *("conveyancer disable", CONVEYANCER, "conveyancer WHERE disabled_at IS NOT NULL", NOTHING),
        records=(1, 2),
        table="conveyancer",
    ),
    Changing(
        "conveyancer enable",
        CONVEYANCER,
        f"conveyancer WHERE id = '{CONVEYANCER}' AND disabled_at IS NULL",
        executing("UPDATE conveyancer SET disabled_at = now()"),
        records=(1, 2),
        table="conveyancer",
    ),
]


@pytest.fixture(params=CHANGING, ids=lambda each: each.action)
async def changing(request):
    """A command that changes something."""
    found: Changing = request.param
    return found


@pytest.fixture
async def world(database, channel, changing):
    """What the command changes, prepared for it."""
    requests = [await store(database) for _ in range(3)]
    await database.execute("DELETE FROM outbox")
    found = World(database, channel, requests)
    await changing.prepare(found)
    return found


async def records(world: World) -> list[tuple[str, str, str]]:
    """Return the changes on record."""
    rows = await world.database.fetch("SELECT action, operator, note FROM operator_action")
    return [tuple(row) for row in rows]


def having(option: str) -> set[str]:
    """Return the commands that have this option."""
    return {
        " ".join(words[1:])
        for words, found in COMMANDS.items()
        if any(parameter.name == option for parameter in found.params)
    }


def test_every_command_that_is_on_record_is_here():
    assert {each.action.removesuffix(" --repair") for each in CHANGING} == having("by")


async def test_change_is_on_record_and_a_repeat_changes_nothing(worker_settings, world, changing):
    await command(worker_settings, *changing.words(world))
    done, recorded = await changing.count_done(world), await records(world)
    await command(worker_settings, *changing.words(world))

    assert done == await changing.count_done(world) == changing.changes
    assert recorded == [(changing.action, "Ada", "a test")] * changing.records[0]


async def test_two_operators_make_each_change_once(worker_settings, world, changing, other_connection):
    words = changing.words(world)
    async with world.database.transaction():
        if changing.table:
            await world.database.execute(f"SELECT FROM {changing.table} FOR UPDATE")
        both = [asyncio.create_task(command(worker_settings, *words)) for _ in range(2)]
        if changing.table:
            await eventually(lambda: both_wait(other_connection))
    ended = await asyncio.gather(*both, return_exceptions=True)

    # Of dead letters that the other holds, one that cannot wait for locks does not see the end.
    failures = [str(each) for each in ended if isinstance(each, BaseException)]
    assert all(not changing.table and "did not arrive. Run it again." in each for each in failures)
    assert await changing.count_done(world) == changing.changes
    assert len(await records(world)) == changing.records[1]


async def both_wait(database: Connection) -> bool:
    """Whether two statements wait for locks."""
    return await count_waiting_statements(database) == 2


async def test_operator_who_vanishes_leaves_no_lock_and_nothing_half_done(
    worker_settings, world, changing, postgres_link, monkeypatch
):
    """For instance with its machine: TCP would notice after two hours."""
    monkeypatch.setattr(connections, "SILENCE_SECONDS", 1.0)
    words, table = changing.words(world), changing.table or "calculation_request"
    everything = await world.database.fetch(f"TABLE {table}")
    away = settings_with(worker_settings, database_url=postgres_link.url)
    postgres_link.hold_before(changing.marker)
    cut_off = asyncio.create_task(command(away, *words))
    await eventually(postgres_link.marker_reached.is_set)

    async def is_free() -> bool:
        rows = await world.database.fetch(f"SELECT FROM {table} FOR UPDATE SKIP LOCKED")
        return len(rows) == len(everything)

    was_free = await is_free()
    await eventually(is_free)
    await postgres_link.cut()
    with pytest.raises((PostgresUnavailable, click.ClickException)):
        await cut_off
    unchanged = await world.database.fetch(f"TABLE {table}") == everything
    done, recorded = await changing.count_done(world), await records(world)
    await command(worker_settings, *words)

    assert was_free is not bool(changing.table)
    assert unchanged
    assert (done, await changing.count_done(world)) == (0, changing.changes)
    # A replay is recorded before it begins.
    assert len(recorded) == (1 if changing.marker == b"INSERT INTO outbox" else 0)


async def test_standby_refuses_a_change_in_a_line(worker_settings, world, changing):
    standby = f"{worker_settings.database_url}?default_transaction_read_only=on"

    refused = "takes no writes: is it a standby|did not record the change. The rest was not moved"
    with pytest.raises((PostgresUnavailable, click.ClickException), match=refused):
        await command(settings_with(worker_settings, database_url=standby), *changing.words(world))


@pytest.mark.parametrize(
    "changing",
    [each for each in CHANGING if each.action in having("dry_run")],
    indirect=True,
    ids=lambda each: each.action,
)
async def test_dry_run_counts_and_changes_nothing(worker_settings, world, changing):
    answer = await command(worker_settings, *changing.words(world), "--dry-run")

    assert answer.text.startswith("3 e")
    assert (await changing.count_done(world), await records(world)) == (0, [])
