"""What commands that change something have in common: on record, once, harmless when repeated or cut off."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import click
import pytest
from aio_pika.abc import AbstractChannel

from service.calculation_requests.model import CalculationRequest
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from tests.harness.databases import count_waiting_statements
from tests.harness.examples import CONVEYANCER
from tests.harness.queues import count
from tests.harness.waiting import eventually
from tests.worker.commands.conftest import command
from tests.worker.commands.steps import bury, intend
from tests.worker.conftest import created_body, settings_with, store
from worker.rabbitmq.topology import NOTIFICATIONS

BY = ("--by", "Ada", "--note", "a test")


class World(NamedTuple):
    """Where a command changes something: three requests, whose events have been published."""

    database: Connection
    channel: AbstractChannel
    requests: list[CalculationRequest]

    async def number(self, statement: str) -> int:
        """Return a number from the database."""
        number: int = await self.database.fetchval(statement)
        return number


class Changing(NamedTuple):
    """A command that changes each of the requests, once."""

    words: tuple[str, ...]
    prepare: Callable[[World], Awaitable[object]]
    done: Callable[[World], Awaitable[int]]  # the number of requests that were changed
    records: int  # in operator_action, of the first run
    marker: bytes = b"INSERT INTO operator_action"  # is executed while the requests are locked, if at all
    locks: bool = True
    dry_run: bool = False

    @property
    def action(self) -> str:
        """What stands on record."""
        return " ".join(self.words[:2])


async def fail_emails(world: World) -> None:
    for request in world.requests:
        await intend(world.database, request)
    await world.database.execute(
        """
        UPDATE email
           SET state = 'failed', smtp_code = 550, reason = 'refused', settled_at = now() - interval '1 s'
        """
    )


async def lose_emails(world: World) -> None:
    await world.database.execute("UPDATE calculation_request SET created_at = created_at - interval '1 h'")


async def bury_all(world: World) -> None:
    for request in world.requests:
        key = f"{request.uuid}.request.created.1"
        await bury(world.channel, NOTIFICATIONS, created_body(request), message_id=key)


COMMANDS = [
    Changing(
        ("outbox", "replay", "--from", "2020-01-01", "--rate", "1000"),
        lambda _: asyncio.sleep(0),
        lambda world: world.number("SELECT count(*) FROM outbox"),
        records=1,
        marker=b"INSERT INTO outbox",
        dry_run=True,
    ),
    Changing(
        ("reconcile", "--repair"),
        lose_emails,
        lambda world: world.number("SELECT count(*) FROM outbox"),
        records=1,
        marker=b"INSERT INTO outbox",
    ),
    Changing(
        ("emails", "resend", "--code", "550"),
        fail_emails,
        lambda world: world.number("SELECT count(*) FROM email WHERE state = 'pending'"),
        records=3,
        dry_run=True,
    ),
    Changing(
        ("emails", "cancel", "--conveyancer", CONVEYANCER),
        lambda world: intend(world.database, world.requests[0]),  # Those of the others have not begun.
        lambda world: world.number("SELECT count(*) FROM email WHERE reason = 'cancelled'"),
        records=3,
        dry_run=True,
    ),
    Changing(
        ("dead-letters", "redrive", NOTIFICATIONS.name),
        bury_all,
        lambda world: count(world.channel, NOTIFICATIONS.name),
        records=3,
        locks=False,
    ),
]


@pytest.fixture(params=COMMANDS, ids=lambda each: each.action)
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


async def test_change_is_on_record_and_a_repeat_changes_nothing(worker_settings, world, changing):
    await command(worker_settings, *changing.words, *BY)
    done, recorded = await changing.done(world), await records(world)
    await command(worker_settings, *changing.words, *BY)

    assert done == await changing.done(world) == 3
    assert recorded == [(changing.action, "Ada", "a test")] * changing.records


async def test_two_operators_change_each_request_once(worker_settings, world, changing, other_connection):
    async with world.database.transaction():
        await world.database.execute("SELECT FROM calculation_request FOR UPDATE")
        both = [asyncio.create_task(command(worker_settings, *changing.words, *BY)) for _ in range(2)]
        if changing.locks:
            await eventually(lambda: both_wait(other_connection))
    ended = await asyncio.gather(*both, return_exceptions=True)

    # Of dead letters that the other holds, one that cannot wait for locks does not see the end.
    failures = [str(each) for each in ended if isinstance(each, BaseException)]
    assert all(not changing.locks and "did not arrive. Run it again." in each for each in failures)
    assert await changing.done(world) == 3
    assert len(await records(world)) == (3 if changing.records == 3 else 2)


async def both_wait(database: Connection) -> bool:
    """Whether two statements wait for locks."""
    return await count_waiting_statements(database) == 2


async def test_operator_who_vanishes_leaves_no_lock_and_nothing_half_done(
    worker_settings, world, changing, postgres_link
):
    """For instance with its machine: TCP would notice after two hours."""
    away = settings_with(worker_settings, database_url=postgres_link.url)
    postgres_link.hold_before(changing.marker)
    cut_off = asyncio.create_task(command(away, *changing.words, *BY))
    await eventually(postgres_link.marker_reached.is_set)

    async def is_free() -> bool:
        rows = await world.database.fetch("SELECT FROM calculation_request FOR UPDATE SKIP LOCKED")
        return len(rows) == 3

    was_free = await is_free()
    await eventually(is_free)
    await postgres_link.cut()
    with pytest.raises((PostgresUnavailable, click.ClickException)):
        await cut_off
    done, recorded = await changing.done(world), await records(world)
    await command(worker_settings, *changing.words, *BY)

    assert was_free is not changing.locks
    assert (done, await changing.done(world)) == (0, 3)
    assert len(recorded) == (0 if changing.records == 3 else 1)  # A replay is recorded before it begins.


@pytest.mark.parametrize(
    "changing", [each for each in COMMANDS if each.dry_run], indirect=True, ids=lambda each: each.action
)
async def test_dry_run_counts_and_changes_nothing(worker_settings, world, changing):
    answer = await command(worker_settings, *changing.words, "--dry-run")

    assert answer.text.startswith("3 e")
    assert (await changing.done(world), await records(world)) == (0, [])
