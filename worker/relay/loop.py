"""Outbox → RabbitMQ: run() is the loop, relay_lanes() one pass over some lanes."""

import asyncio
import random
import time
from collections.abc import Sequence
from functools import partial

import structlog
from aio_pika.abc import AbstractChannel

from service.outbox import writing
from service.postgres import loans, outages
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.server.probes import NotReady
from service.telemetry import logs
from worker import metrics
from worker.rabbitmq import connection as broker
from worker.rabbitmq import topology
from worker.rabbitmq.alarm import Alarm
from worker.rabbitmq.connection import BrokerUnavailable, TopologyDiffers
from worker.relay import outbox
from worker.relay.low_water import LaneMarks
from worker.relay.outbox import Due, LaneLost, OutboxRow
from worker.relay.publisher import Outcome, Publisher
from worker.relay.refusals import Retries
from worker.settings import WorkerSettings
from worker.waiting import Pauses, rest

_LANES_AT_ONCE = writing.LANES // 2  # in one transaction; the rest is left to other relays meanwhile
_LOOK_BACK_SECONDS = 60.0
_LONGEST_LOOK_SECONDS = 30.0

_log = structlog.get_logger()


class Relay:
    """Publishes what stands in the outbox, in order within each request, and deletes what is confirmed.

    Any number of relays share the lanes: each takes some at a time under locks that end with the
    transaction, so there is no leader and nothing to clean up after a crash.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        pool: Pool,
        woken: asyncio.Event,
        *,
        look_back_seconds: float = _LOOK_BACK_SECONDS,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._woken = woken
        self._connected = False
        self._obstacle = ""
        self._alarm = Alarm()
        self._marks = LaneMarks()
        self._retries = Retries(pause_seconds=settings.relay_retry_seconds)
        self._look_back_seconds = look_back_seconds
        self._look_back_at = time.monotonic() + look_back_seconds
        self._look_seconds = self._statement_seconds
        metrics.broker_blocked.set_function(lambda: self._alarm.is_raised)

    @property
    def low_water_marks(self) -> list[int]:
        """Where each lane begins."""
        return self._marks.low_water

    async def check(self) -> None:
        """Raise NotReady while RabbitMQ is away, or takes nothing."""
        await self._alarm.check()
        if not self._connected:
            raise NotReady(self._obstacle or "not connected to RabbitMQ")

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until *stop*, through every outage of RabbitMQ and Postgres."""
        pauses = Pauses("relay_paused", longest_seconds=self._settings.longest_outage_pause_seconds)
        while not stop.is_set():
            try:
                needs = [topology.REQUESTS]
                async with broker.open_role(self._settings, name="relay", needs=needs) as channel:
                    await self._relay_on(channel, pauses, stop)
            except (BrokerUnavailable, PostgresUnavailable, LaneLost) as error:
                dependency = "rabbitmq" if isinstance(error, BrokerUnavailable) else "postgres"
                metrics.outages.labels(dependency).inc()
                self._marks = LaneMarks()  # A failover may have set ids back.
                self._obstacle = str(error) if isinstance(error, TopologyDiffers) else ""
                await pauses.after(error, stop)
            finally:
                self._connected, self._alarm = False, Alarm()

    async def _relay_on(self, channel: AbstractChannel, pauses: Pauses, stop: asyncio.Event) -> None:
        """Relay on one channel until *stop* or the first outage, resting only when nothing is due."""
        publisher = await Publisher.on(channel, timeout_seconds=self._settings.broker_timeout_seconds)
        async with in_background("broker_alarm", partial(self._alarm.watch, channel)):
            await publisher.probe(self._alarm, stop)
            self._connected = True
            while not stop.is_set():
                if channel.is_closed:
                    raise BrokerUnavailable("the channel was closed")
                self._woken.clear()
                moved = await self.relay_due(publisher, stop)
                pauses.reset()
                if moved == 0:
                    await rest(self._settings.relay_poll_seconds, self._woken, stop)
                    metrics.wakeups.labels("notify" if self._woken.is_set() else "poll").inc()

    async def relay_due(self, publisher: Publisher, stop: asyncio.Event) -> int:
        """Give every lane in which something is due one pass. Returns the number of events moved."""
        if recovering := self._retries.recovering:
            await self._make_refused_due(recovering)
        due = await self._find_due()
        lanes = list({*due.lanes, *due.held_lanes})
        random.shuffle(lanes)  # Relays that start together should not meet.
        moved = 0
        for first in range(0, len(lanes), _LANES_AT_ONCE):
            if not stop.is_set():
                some = lanes[first : first + _LANES_AT_ONCE]
                moved += await self.relay_lanes(publisher, some, held_lanes=due.held_lanes)
        return moved

    async def _make_refused_due(self, kinds: Sequence[bool]) -> None:
        """End the wait of refused events, some at a time: what refused them takes one of them now."""
        async with loans.connection(self._pool, seconds=self._statement_seconds) as connection:
            limit = self._settings.relay_held_batch_size
            if await outbox.make_refused_due(connection, kinds, limit=limit) == 0:
                self._retries.note_recovered()

    async def _find_due(self) -> Due:
        """Look behind the marks. A look that fails is followed by a longer one.

        For the first has none, and may step over millions of rows that are gone but for an old snapshot.
        """
        if time.monotonic() >= self._look_back_at:
            await self._look_back()
        seconds = self._look_seconds
        self._look_seconds = min(2 * seconds, _LONGEST_LOOK_SECONDS)
        async with loans.connection(self._pool, seconds=seconds) as connection:
            due = await outbox.find_due(connection, self._marks.low_water)
        self._look_seconds = self._statement_seconds
        self._marks.note_due(due)
        return due

    async def _look_back(self) -> None:
        """As a precaution, look for events that the marks have passed: their lanes begin anew."""
        self._look_back_at = time.monotonic() + self._look_back_seconds
        try:
            async with loans.connection(self._pool, seconds=self._statement_seconds) as connection:
                passed = await outbox.find_passed(connection, self._marks.low_water)
        except PostgresUnavailable as error:
            _log.warning("look_back_failed", error=logs.summarize(error))
            return
        if passed:
            _log.error("events_passed_over", lanes=passed)
            metrics.lanes_passed_over.inc(len(passed))
            self._marks.forget(passed)

    async def relay_lanes(
        self, publisher: Publisher, lanes: Sequence[int], *, held_lanes: Sequence[int] | None = None
    ) -> int:
        """Publish the oldest events of some lanes, and those held that are due; delete what is confirmed.

        *held_lanes* are those in which any is held and due, where that is known: none spares a query.

        Returns the number of events that left the lanes, confirmed or held back. A crash between confirm and
        commit publishes a batch again: delivery is at least once, in order per request. Raises
        BrokerUnavailable, after what was confirmed has been settled.
        """
        seconds = self._settings.broker_timeout_seconds + 2 * self._statement_seconds
        # A crash of Postgres may forget what was settled a moment ago: it is published again then, in order.
        async with loans.transaction(self._pool, seconds=seconds, waits_for_disk=False) as connection:
            fresh, held = await self._take(connection, lanes, lanes if held_lanes is None else held_lanes)
            if not fresh and not held:
                return 0
            window = [*_first_of_each_request(fresh), *held]
            outcome = await self._publish(connection, publisher, window)
            self._retries.note(fresh, held, outcome)
            moved = await self._settle(connection, fresh, held, outcome)
        metrics.count_settled([row for row in window if row.id in outcome.confirmed])
        if moved:
            _log.info("outbox_relayed", events=len(outcome.confirmed), failed=len(outcome.failed))
        if outcome.outage is not None:
            raise BrokerUnavailable from outcome.outage
        return moved

    async def _take(
        self, connection: Connection, lanes: Sequence[int], held_lanes: Sequence[int]
    ) -> tuple[list[OutboxRow], list[OutboxRow]]:
        """Lock those of *lanes* that are free. Returns their oldest events, and those held that are due."""
        locked = await outbox.lock_lanes(connection, lanes)
        if not locked.lanes:
            return [], []
        low_water = self._marks.low_water
        fresh = await outbox.read(
            connection,
            locked.lanes,
            low_water=[low_water[lane] for lane in locked.lanes],
            limit=-(-self._settings.relay_batch_size // len(locked.lanes)),
        )
        first_ids = {row.lane: row.id for row in reversed(fresh)}
        for lane, first_id in first_ids.items():
            self._marks.note_first(locked.snapshot, lane, first_id)
        return fresh, await self._take_held(connection, sorted({*locked.lanes} & {*held_lanes}))

    async def _take_held(self, connection: Connection, lanes: Sequence[int]) -> list[OutboxRow]:
        """Return events of locked lanes that are to be tried again now."""
        if not lanes:
            return []
        limit = -(-self._settings.relay_held_batch_size // len(lanes))
        return self._retries.choose(await outbox.read_held(connection, lanes, limit=limit))

    async def _publish(
        self, connection: Connection, publisher: Publisher, window: Sequence[OutboxRow]
    ) -> Outcome:
        """Publish while the lanes are ours: with the connection their locks go, and others have them."""
        lost, published = asyncio.Event(), asyncio.Event()

        def note_loss(_: object) -> None:
            lost.set()

        connection.add_termination_listener(note_loss)
        keeping = asyncio.create_task(_keep_lanes(connection, lost, published))
        try:
            outcome = await publisher.publish(window, abandoned=lost)
        finally:
            published.set()
            await keeping  # Never cancelled: that would cancel the transaction too.
            connection.remove_termination_listener(note_loss)
        if lost.is_set():
            raise PostgresUnavailable
        return outcome

    async def _settle(
        self,
        connection: Connection,
        fresh: Sequence[OutboxRow],
        held: Sequence[OutboxRow],
        outcome: Outcome,
    ) -> int:
        """Delete what was confirmed, hold back what failed and what must wait behind it."""
        delivered = [row for row in fresh if row.id in outcome.confirmed]
        redelivered = [row for row in held if row.id in outcome.confirmed]
        holding = [row for row in fresh if row.held or row.id in outcome.failed]
        await outbox.delete(connection, delivered)
        await outbox.hold(connection, holding)  # Before the next: that wakes what waits behind it.
        await outbox.delete_held(connection, redelivered)
        if outcome.failed:
            await self._charge(connection, [*fresh, *held], outcome)
        return len(delivered) + len(redelivered) + len(holding)

    async def _charge(self, connection: Connection, rows: Sequence[OutboxRow], outcome: Outcome) -> None:
        """Have what was refused tried again later, and park what never can be published."""
        refused = [row for row in rows if row.id in outcome.refused]
        unencodable = [row for row in rows if row.id in outcome.unencodable]
        await outbox.postpone(
            connection,
            refused,
            [outcome.refused[row.id] for row in refused],
            base_seconds=self._settings.relay_retry_seconds,
            longest_seconds=self._settings.relay_longest_retry_seconds,
        )
        await outbox.park(connection, unencodable, [outcome.unencodable[row.id] for row in unencodable])
        for row in (*refused, *unencodable):
            _log.warning("event_not_published", event_id=row.event_id, reason=outcome.failed[row.id])

    @property
    def _statement_seconds(self) -> float:
        return max(self._settings.database_timeout_seconds, 5.0)


async def _keep_lanes(connection: Connection, lost: asyncio.Event, published: asyncio.Event) -> None:
    """Talk to Postgres until *published*: it ends a transaction that falls silent. It may be away too."""
    while True:
        await rest(loans.SILENCE_SECONDS / 3, published, lost)
        if published.is_set() or lost.is_set():
            return
        try:
            await connection.execute("SELECT 1", timeout=loans.SILENCE_SECONDS / 3)
        except outages.OUTAGE_ERRORS:
            lost.set()


def _first_of_each_request(rows: Sequence[OutboxRow]) -> list[OutboxRow]:
    """Leave out every event that must wait for an earlier one of its request to be confirmed."""
    first = {row.request_id: row for row in reversed(rows) if not row.held}
    return [row for row in rows if first.get(row.request_id) is row]
