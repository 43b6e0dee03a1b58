"""Outbox → RabbitMQ: run() is the loop, relay_lanes() one pass over some lanes."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import structlog
from aio_pika.abc import AbstractChannel

from service.identifiers import uuid_of
from service.outbox.lanes import LANES
from service.postgres import loans
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection, Pool
from service.server.background import in_background
from service.server.probes import NotReady
from service.telemetry import logs
from worker import metrics
from worker.rabbitmq import topology
from worker.rabbitmq.alarm import Alarm
from worker.rabbitmq.connection import BrokerUnavailable, TopologyDiffers, open_role
from worker.relay import backlog, outbox
from worker.relay.lanes import Work, find_passed, find_work, lanes_kept, lock_lanes
from worker.relay.low_water import LaneMarks
from worker.relay.outbox import LaneLost, OutboxRow
from worker.relay.publisher import Outcome, Publisher
from worker.relay.refusals import Retries
from worker.settings import WorkerSettings
from worker.waiting import Pauses, wait_at_most

# Lanes of one transaction. With a transaction for each lane, an event could wait for sixteen of them. The
# other half of the lanes is left to other relays.
_LANES_AT_ONCE = LANES // 2
# After a relay has moved something, it looks again after each of these pauses before it waits for a NOTIFY.
# A busy writer sends one only every 20 ms, which spares its commits. A look costs 0.2 ms.
_QUICK_LOOK_SECONDS = (0.001, 0.002, 0.004, 0.008)
_LOOK_BACK_SECONDS = 60.0
_LONGEST_LOOK_SECONDS = 30.0

_log = structlog.get_logger()


class Relay:
    """Publishes the events of the outbox, in order within each request, and deletes those confirmed.

    Any number of relays share the lanes. Each takes some at a time, under locks that end with the
    transaction: there is no leader, and nothing to clean up after a crash.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        pool: Pool,
        woken: asyncio.Event,
        *,
        look_back_seconds: float = _LOOK_BACK_SECONDS,
    ) -> None:
        self.marks = LaneMarks()
        self._settings = settings
        self._pool = pool
        self._woken = woken
        self._connected = False
        self._obstacle = ""
        self._alarm = Alarm()
        self._retries = Retries(pause_seconds=settings.relay_retry_seconds)
        self._look_back_seconds = look_back_seconds
        self._look_back_at = time.monotonic() + look_back_seconds
        self._look_seconds = self._statement_seconds
        metrics.broker_blocked.set_function(lambda: self._alarm.is_raised)

    async def check(self) -> None:
        """Raise NotReady while RabbitMQ is unavailable or blocks publishers."""
        await self._alarm.check()
        if not self._connected:
            raise NotReady(self._obstacle or "not connected to RabbitMQ")

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until *stop*, through every outage of RabbitMQ and Postgres."""
        pauses = Pauses("relay_paused")
        while not stop.is_set():
            try:
                async with open_role(self._settings, name="relay", needs=[topology.REQUESTS]) as channel:
                    await self._relay_on(channel, pauses, stop)
            except (BrokerUnavailable, PostgresUnavailable, LaneLost) as error:
                dependency = "rabbitmq" if isinstance(error, BrokerUnavailable) else "postgres"
                metrics.outages.labels(dependency).inc()
                self.marks.forget_all()  # A failover may have set ids back.
                self._obstacle = str(error) if isinstance(error, TopologyDiffers) else ""
                await pauses.log_and_wait(error, stop)
            finally:
                self._connected, self._alarm = False, Alarm()

    async def _relay_on(self, channel: AbstractChannel, pauses: Pauses, stop: asyncio.Event) -> None:
        """Relay on one channel until *stop* or the first outage. Wait only when nothing is due."""
        quick_looks: Iterator[float] = iter(())
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
                if moved:
                    quick_looks = iter(_QUICK_LOOK_SECONDS)
                elif seconds := next(quick_looks, None):
                    await wait_at_most(seconds, self._woken, stop)
                else:
                    await wait_at_most(self._settings.relay_poll_seconds, self._woken, stop)
                    metrics.wakeups.labels("notify" if self._woken.is_set() else "poll").inc()

    async def relay_due(self, publisher: Publisher, stop: asyncio.Event) -> int:
        """Make one pass over every lane with work. Returns the number of events moved."""
        if recovering := self._retries.recovering:
            await self._make_refused_due(recovering)
        work = await self._find_work()
        lanes = list({*work.fresh_lanes, *work.due_lanes})
        random.shuffle(lanes)  # so that relays that start together do not compete for the same lanes
        moved = 0
        for first in range(0, len(lanes), _LANES_AT_ONCE):
            if not stop.is_set():
                some = lanes[first : first + _LANES_AT_ONCE]
                moved += await self.relay_lanes(publisher, some, due_lanes=work.due_lanes)
        return moved

    async def _make_refused_due(self, kinds: Sequence[bool]) -> None:
        """Make some refused events due at each pass, until none is left: their queue takes events again."""
        async with loans.connection(self._pool, seconds=self._statement_seconds) as connection:
            limit = self._settings.relay_held_batch_size
            if await outbox.make_refused_due(connection, kinds, limit=limit) == 0:
                self._retries.note_recovered()

    async def _find_work(self) -> Work:
        """Look for work from the marks on.

        The first look has no marks, and may step over millions of dead rows while an old snapshot is held. So
        after a look that timed out, the next may take twice as long.
        """
        if time.monotonic() >= self._look_back_at:
            await self._look_back()
        seconds = self._look_seconds
        self._look_seconds = min(2 * seconds, _LONGEST_LOOK_SECONDS)
        async with loans.connection(self._pool, seconds=seconds) as connection:
            work = await find_work(connection, self.marks.low_water)
        self._look_seconds = self._statement_seconds
        self.marks.note_work(work)
        return work

    async def _look_back(self) -> None:
        """As a precaution, look for events below the marks. Lanes that have any are read from their start."""
        self._look_back_at = time.monotonic() + self._look_back_seconds
        try:
            async with loans.connection(self._pool, seconds=self._statement_seconds) as connection:
                passed = await find_passed(connection, self.marks.low_water)
        except PostgresUnavailable as error:
            _log.warning("look_back_failed", error=logs.summarize(error))
            return
        if passed:
            _log.error("events_passed_over", lanes=passed)
            metrics.lanes_passed_over.inc(len(passed))
            self.marks.forget(passed)

    async def relay_lanes(
        self, publisher: Publisher, lanes: Sequence[int], *, due_lanes: Sequence[int] | None = None
    ) -> int:
        """Publish the oldest events of some lanes, and held events that are due; delete those confirmed.

        *due_lanes* are the lanes with held events that are due. Without it, all are looked at for them.

        Returns the number of events that left their lane, confirmed or held. After a crash between confirm
        and commit the same events are published again: delivery is at least once, in order within a request.
        Raises BrokerUnavailable, after settling what was confirmed.
        """
        seconds = self._settings.broker_timeout_seconds + 2 * self._statement_seconds
        # Waiting for the disk is not needed: if Postgres crashes and forgets a commit, the same events are
        # published again, in order.
        async with loans.transaction(self._pool, seconds=seconds, waits_for_disk=False) as connection:
            fresh, due = await self._take(connection, lanes, lanes if due_lanes is None else due_lanes)
            if not fresh and not due:
                return 0
            window = [*_first_of_each_request(fresh), *due]
            async with lanes_kept(connection) as lost:
                outcome = await publisher.publish(window, abandoned=lost)
            self._retries.note(fresh, due, outcome)
            moved = await self._settle(connection, fresh, due, outcome)
        backlog.count_settled([row for row in window if row.id in outcome.confirmed])
        if moved:
            _log.info("outbox_relayed", events=len(outcome.confirmed), failed=len(outcome.failed))
        if outcome.outage is not None:
            raise BrokerUnavailable from outcome.outage
        return moved

    async def _take(
        self, connection: Connection, lanes: Sequence[int], due_lanes: Sequence[int]
    ) -> tuple[list[OutboxRow], list[OutboxRow]]:
        """Lock those of *lanes* that are free. Returns their oldest events, and held events to publish."""
        locked = await lock_lanes(connection, lanes)
        if not locked.lanes:
            return [], []
        low_water = self.marks.low_water
        fresh = await outbox.read(
            connection,
            locked.lanes,
            low_water=[low_water[lane] for lane in locked.lanes],
            limit=-(-self._settings.relay_batch_size // len(locked.lanes)),
        )
        first_ids = {row.lane: row.id for row in reversed(fresh)}
        for lane, first_id in first_ids.items():
            self.marks.note_first(locked.snapshot, lane, first_id)
        return fresh, await self._take_due(connection, sorted({*locked.lanes} & {*due_lanes}))

    async def _take_due(self, connection: Connection, lanes: Sequence[int]) -> list[OutboxRow]:
        """Return the held events of locked lanes that are to be published now."""
        if not lanes:
            return []
        limit = -(-self._settings.relay_held_batch_size // len(lanes))
        return self._retries.choose(await outbox.read_due(connection, lanes, limit=limit))

    async def _settle(
        self,
        connection: Connection,
        fresh: Sequence[OutboxRow],
        due: Sequence[OutboxRow],
        outcome: Outcome,
    ) -> int:
        """Delete events that were confirmed; hold those that failed, and those that must wait behind them."""
        delivered = [row for row in fresh if row.id in outcome.confirmed]
        redelivered = [row for row in due if row.id in outcome.confirmed]
        to_hold = [row for row in fresh if row.must_wait or row.id in outcome.failed]
        await outbox.delete(connection, delivered)
        await outbox.hold(connection, to_hold)  # Before delete_held, which makes those due that waited.
        await outbox.delete_held(connection, redelivered)
        if outcome.failed:
            await self._charge(connection, [*fresh, *due], outcome)
        for row in fresh:
            if row.must_wait:
                _log.info("event_held", **_story(row))
        for row in redelivered:
            _log.info("held_event_published", attempts=row.attempts + 1, **_story(row))
        return len(delivered) + len(redelivered) + len(to_hold)

    async def _charge(self, connection: Connection, rows: Sequence[OutboxRow], outcome: Outcome) -> None:
        """Postpone events that were refused, and park those that cannot be encoded."""
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
            _log.warning("event_not_published", reason=outcome.failed[row.id], **_story(row))

    @property
    def _statement_seconds(self) -> float:
        return max(self._settings.database_timeout_seconds, 5.0)


def _story(row: OutboxRow) -> dict[str, Any]:
    return {"event_id": row.event_id} | logs.about(uuid_of(row.request_id), row.traceparent)


def _first_of_each_request(rows: Sequence[OutboxRow]) -> list[OutboxRow]:
    """Leave out every event that must wait until an earlier one of its request is confirmed."""
    first = {row.request_id: row for row in reversed(rows) if not row.must_wait}
    return [row for row in rows if first.get(row.request_id) is row]
