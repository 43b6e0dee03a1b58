"""The relay as a state machine, with real Postgres and a broker whose replies are scripted."""

import asyncio
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from service.calculation_requests import changing
from service.identifiers import uuid_of
from service.outbox import events
from service.postgres import connections, outages
from service.postgres.outages import OUTAGE_ERRORS
from service.postgres.pool import open_pool
from tests.harness import databases
from tests.harness.processes import email_settings
from tests.harness.scripted_broker import NO_SCRIPT, Script, ScriptedBroker
from tests.harness.waiting import eventually
from worker.rabbitmq.connection import BrokerUnavailable, open_channel
from worker.relay import loop
from worker.relay.loop import Relay
from worker.relay.publisher import Publisher

REQUESTS = [UUID(int=number) for number in range(1, 5)]
WINDOW = 8
PATCHES: Any = {"_BATCH_SIZE": WINDOW, "_RETRY_SECONDS": 0.0001, "_FAILED_RETRY_SECONDS": 0.0}
TYPES = ("request.created", "request.email_sent", "request.calculated")
REPLIES = ["ack", "ack", "ack", "nack", "return", "silence", "close channel", "close connection"]

scripts = st.builds(
    Script,
    replies=st.lists(st.sampled_from(REPLIES), max_size=WINDOW),
    order=st.permutations(range(WINDOW)),
    multiple=st.booleans(),
)


class RelayModel(RuleBasedStateMachine):
    """Requests write events, each in its order; a relay publishes them; a broker replies by a script."""

    database_url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.resources, self.channel = AsyncExitStack(), AsyncExitStack()
        self.written: dict[UUID, list[str]] = {}
        self.publisher: Publisher | None = None
        self.run(self._start())

    def run(self, coroutine: Any) -> Any:
        """Run one step in the model's own event loop, with a timeout."""
        return self.runner.run(asyncio.wait_for(coroutine, 30))

    async def _start(self) -> None:
        self.broker = await self.resources.enter_async_context(ScriptedBroker())
        self.settings = email_settings(
            database_url=databases.as_role(self.database_url, "worker"),
            database_timeout_seconds=60.0,
            amqp_url=self.broker.url,
            broker_timeout_seconds=0.25,
        )
        self.pool = await self.resources.enter_async_context(open_pool(self.settings))
        self.observer = await asyncpg.connect(self.database_url)
        await self.observer.execute("TRUNCATE event, outbox")
        self.resources.enter_context(patch.multiple(loop, **PATCHES))
        self.relay = Relay(self.settings, self.pool, asyncio.Event())

    def teardown(self) -> None:
        self.observer.terminate()
        self.run(self.channel.aclose())
        self.run(self.resources.aclose())
        self.runner.close()

    @rule(request_id=st.sampled_from(REQUESTS), count=st.integers(1, 3))
    def write_events(self, request_id: UUID, count: int) -> None:
        """Commit the next events of a request."""
        written = self.written.setdefault(request_id, [])
        for _ in range(count):
            sequence = len(written) + 1
            event_type = TYPES[min(sequence, len(TYPES)) - 1]
            row = (request_id, sequence, event_type, "acme", datetime.now(UTC), "{}", None)
            self.run(self.observer.execute(changing.WRITE_EVENTS, *row))
            written.append(events.event_id(uuid_of(request_id), event_type, sequence))

    @rule(script=scripts)
    def relay_once(self, script: Script) -> None:
        """Make one pass in which all refused events are due, with the broker's replies from *script*."""
        due = "UPDATE outbox SET next_attempt_at = now() WHERE next_attempt_at IS NOT NULL"
        self.run(self.observer.execute(due))
        self.broker.script = script
        with suppress(BrokerUnavailable):
            self.run(self._relay_once())
        self.broker.script = NO_SCRIPT

    @rule(passes=st.integers(2, 4))
    def relay_while_refusals_go_on(self, passes: int) -> None:
        for _ in range(passes):
            self.relay_once(Script(["nack"] * WINDOW))

    async def _stored(self) -> set[str]:
        rows = await self.observer.fetch(
            "SELECT request_id, type, sequence FROM outbox JOIN event USING (request_id, sequence)"
        )
        return {events.event_id(uuid_of(request_id), *event) for request_id, *event in rows}

    async def _relay_once(self) -> None:
        """Make one pass on the same channel as the last, unless that one may not be used again."""
        if self.publisher is None or not self.publisher.is_usable:
            await self.channel.aclose()
            channel = await self.channel.enter_async_context(open_channel(self.settings, name="model"))
            seconds = self.settings.broker_timeout_seconds
            self.publisher = Publisher(await channel.get_underlay_channel(), timeout_seconds=seconds)
        await self.relay.relay_due(self.publisher)

    @rule(script=scripts)
    def relay_while_postgres_cuts_the_connection(self, script: Script) -> None:
        """Make a pass in which the connection that locks the events is cut: nothing may be settled."""
        self.broker.script = script
        with suppress(BrokerUnavailable, outages.PostgresUnavailable, *OUTAGE_ERRORS):
            self.run(self._relay_and_cut())
        self.run(eventually(self._has_noticed_the_cut))
        self.broker.script = NO_SCRIPT

    async def _relay_and_cut(self) -> None:
        relaying = asyncio.create_task(self._relay_once())
        await asyncio.sleep(0)
        await self.observer.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await relaying

    async def _has_noticed_the_cut(self) -> bool:
        """Whether the pool lends a working connection: it may not have noticed yet that one was cut."""
        with suppress(outages.PostgresUnavailable):
            async with connections.acquired(self.pool, seconds=5.0) as connection:
                return bool(await connection.fetchval("SELECT true"))
        return False

    @invariant()
    def nothing_is_lost_nor_settled_unconfirmed(self) -> None:
        """Every event that is no longer stored was confirmed."""
        written = {event for events_of_one in self.written.values() for event in events_of_one}
        assert written - self.run(self._stored()) <= self.broker.confirmed

    @invariant()
    def events_of_a_request_first_arrive_in_order(self) -> None:
        """No event reaches the queues before an earlier one of its request."""
        for written in self.written.values():
            mine = [event for event in dict.fromkeys(self.broker.taken) if event in written]
            assert mine == sorted(mine, key=written.index)

    @rule()
    def drain_with_a_broker_that_works(self) -> None:
        """With a working broker, all events are delivered within a bounded number of passes."""
        for _ in range(60):
            self.relay_once(NO_SCRIPT)
            if not self.run(self._stored()):
                break
        assert self.run(self._stored()) == set()
        created = {written[0] for written in self.written.values()}
        assert created <= set(self.broker.taken), "an event that must be routed was dropped"


@pytest.mark.parametrize("histories", [10, pytest.param(100, marks=pytest.mark.long)])
def test_relay_keeps_its_guarantees_for_any_replies_of_the_broker(histories, database_url):
    RelayModel.database_url = database_url
    limits = {"max_examples": histories, "stateful_step_count": 25, "deadline": None}
    checks = settings(**limits, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(RelayModel, settings=checks)
