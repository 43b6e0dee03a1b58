"""Postgres goes back to an earlier moment: what is repeated, lost, and to be done again."""

from functools import partial
from typing import Any

import pytest

from tests.end_to_end.parties import another_request, create, publish_calculation
from tests.harness import databases, in_process
from tests.harness.http import bearer
from tests.harness.in_process import api_client, worker_probes
from tests.harness.queues import holds
from tests.harness.standby import restorable
from tests.harness.waiting import eventually
from worker.rabbitmq.topology import CALCULATION_RESULTS

pytestmark = pytest.mark.long

MAKE_OLD = "UPDATE calculation_request SET created_at = created_at - interval '10 min'"
SENT = "count(*) = $1 FROM email WHERE state = 'sent'"
PUBLISHED = "NOT EXISTS (SELECT FROM outbox)"
CALCULATED = f"count(*) = $1 FROM calculation_request WHERE calculation_id IS NOT NULL AND {PUBLISHED}"


@pytest.fixture
async def postgres():
    """A Postgres that can go back, private."""
    async with restorable() as server:
        yield server


@pytest.fixture
def database_url(postgres):
    return postgres.url


@pytest.fixture
def stored(postgres):
    async def is_true(condition: str, *values: object) -> bool:
        async with databases.connected(postgres.url) as connection:
            return bool(await connection.fetchval(f"SELECT {condition}", *values))

    return lambda condition, *values: eventually(partial(is_true, condition, *values))


@pytest.fixture
def operate(environment, worker_settings):
    """Run an operator's command, and return its exit status and what it printed."""

    async def run(*words: str) -> tuple[int, str]:
        variables = environment | {"AMQP_URL": worker_settings.amqp_url}
        ended = await in_process.run("worker", *words, environment=variables)
        assert "Error" not in ended.errors, ended.errors
        return ended.status, ended.output

    return run


def to(record: dict[str, Any], mail_server) -> list[str]:
    """Return the Message-IDs of the e-mails to the customer of a request, in order."""
    mails = [each.message for each in mail_server.accepted if record["customer_email"] in each.recipients]
    return [mail["Message-ID"] for mail in mails]


async def test_what_came_after_the_moment_is_lost_or_repeated_as_the_page_says(
    *, postgres, service_settings, worker_settings, issuer, operate, stored, channel, subscriber, mail_server
):
    async with (
        worker_probes(worker_settings, "relay", "calculations"),
        api_client(service_settings, issuer.token()) as client,
    ):
        async with worker_probes(worker_settings, "notifications"):
            finished, uncalculated = await create(client), await create(client)
            await publish_calculation(channel, finished["uuid"], "calculation")
            await stored(SENT, 2)
            await stored(CALCULATED, 1)
            mail_server.rcpt_reply = "451 later"
            unsent = await create(client)
            await stored("EXISTS (SELECT FROM email WHERE attempts > 0 AND state = 'pending')")
        queued = await create(client)
        await stored(PUBLISHED)
        moment = await postgres.now()

        mail_server.rcpt_reply = "250 OK"
        body, key = another_request(), {"Idempotency-Key": "case-18"}
        lost = (await client.post("/v1/request", json=body, headers=key)).json()["data"]
        async with worker_probes(worker_settings, "notifications"):
            await stored(SENT, 5)
        for record in (uncalculated, queued):
            await publish_calculation(channel, record["uuid"], "calculation")
        await stored(CALCULATED, 3)
    await publish_calculation(channel, lost["uuid"], "calculation")  # is read only after the restore
    before = {event["id"]: event for event in subscriber.received}
    assert all(len(to(record, mail_server)) == 1 for record in (finished, uncalculated, unsent, queued, lost))

    await postgres.restore(moment)
    async with (
        worker_probes(worker_settings, "relay", "calculations"),
        api_client(service_settings, issuer.token()) as client,
    ):
        paths = [f"/v1/request/{each['uuid']}" for each in (finished, queued, lost)]
        assert [(await client.get(path)).status_code for path in paths] == [200, 200, 404]
        assert (await client.get(paths[-1], headers=bearer(lost["secret"]))).status_code == 401
        again = (await client.post("/v1/request", json=body, headers=key)).json()["data"]
        for record in (uncalculated, queued):
            await publish_calculation(channel, record["uuid"], "calculation-2")
        await stored(CALCULATED, 3)
        await eventually(lambda: holds(channel, CALCULATION_RESULTS.dead_letters, 1))
        assert "RequestNotFound" in (await operate("dead-letters", "list", CALCULATION_RESULTS.name))[1]
        async with worker_probes(worker_settings, "notifications"):
            await stored(SENT, 4)  # `queued` is forgotten
            async with databases.connected(postgres.url) as connection:
                await connection.execute(MAKE_OLD)
            found = await operate("reconcile", "--since", "1h")
            replayed = await operate("outbox", "replay", "--from", "1h", "--by", "Ada")
            await stored(SENT, 5)
            sound = await operate("reconcile", "--since", "1h")

    assert again["uuid"] != lost["uuid"]
    assert [each["uuid"] in found[1] for each in (queued, uncalculated, unsent)] == [True, False, False]
    assert (found[0], replayed[0], sound[0]) == (1, 0, 0)
    for record, times in ((finished, 1), (uncalculated, 1), (unsent, 2), (queued, 2), (lost, 2)):
        sent = to(record, mail_server)
        # The second to the customer of `lost` is about another request.
        assert (len(sent), len(set(sent))) == (times, 2 if record is lost else 1)
    after = subscriber.about(uncalculated["uuid"])[-1]
    assert after["data"]["calculation_id"] == "calculation-2"
    assert before[after["id"]]["data"]["calculation_id"] == "calculation"
    types = [event["type"] for event in subscriber.about(queued["uuid"]) if event["data"]["sequence"] == 2]
    assert types[:2] == ["request.email_sent", "request.calculated"]
