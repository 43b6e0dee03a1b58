"""SIGKILL of the worker at any moment: every request answered with 200 goes through its whole chain."""

import asyncio
import random
from collections.abc import Collection

from tests.end_to_end.callers import create_many
from tests.end_to_end.events import ALL_ARE_DONE, publish_calculation
from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually

_CHANCE = random.Random(20)  # noqa: S311 - the same moments in every run
_ROUNDS = 6
_REQUESTS_A_ROUND = 25


async def test_no_event_email_or_calculation_is_lost_when_the_worker_is_killed(
    *, api, worker_settings, tmp_path, caller, channel, subscriber, mail_server, database
):
    mail_server.data_delay_seconds = 0.02
    # A claim that a busy machine renews in time; after a kill its e-mail waits for the end of it.
    worker = worker_process(worker_settings, tmp_path, EMAIL_CLAIM_SECONDS="5")
    uuids: list[str] = []
    customers: set[str] = set()

    async def create_and_calculate() -> None:
        for record in await create_many(caller, _REQUESTS_A_ROUND):
            uuids.append(record["uuid"])
            customers.add(record["customer_email"])
            await publish_calculation(channel, record["uuid"], f"calculation-of-{record['uuid']}")

    async with started(api, worker):
        for _ in range(_ROUNDS):
            async with asyncio.TaskGroup() as load:
                load.create_task(create_and_calculate())
                await _any_moment_while_growing(_CHANCE.choice([mail_server.accepted, subscriber.received]))
                await worker.kill()
                worker.start()
        await eventually(lambda: database.fetchval(ALL_ARE_DONE))
        await eventually(lambda: len(subscriber.event_ids) == 3 * len(uuids))

    assert len(uuids) == _ROUNDS * _REQUESTS_A_ROUND
    for uuid in uuids:
        sequences = [event["data"]["sequence"] for event in subscriber.about(uuid)]
        assert set(sequences) == {1, 2, 3}
        assert sequences == sorted(sequences), "a repeat came after a later event"
        assert subscriber.types(uuid) == {"request.created", "request.email_sent", "request.calculated"}
    assert {mail.recipients[0] for mail in mail_server.accepted} == customers


async def _any_moment_while_growing(collection: Collection[object]) -> None:
    """Wait for a random moment while work is in progress."""
    goal = len(collection) + _CHANCE.randint(1, _REQUESTS_A_ROUND - 5)
    await eventually(lambda: len(collection) >= goal)
