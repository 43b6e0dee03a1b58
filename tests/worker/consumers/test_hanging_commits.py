"""While Postgres answers and no commit ends, as without its standby, the messages stay in their queue."""

from structlog.testing import capture_logs

from service.outbox.lanes import RelayWaker
from service.postgres.pool import open_pool
from tests.harness import databases
from tests.harness.in_process import running
from tests.harness.queues import count
from tests.harness.standby import replicated
from tests.harness.stored import insert, new_request
from tests.harness.waiting import eventually
from tests.worker.conftest import publish, settings_with
from worker.consumers import calculations
from worker.rabbitmq.topology import CALCULATION_RESULTS


async def test_queue_is_opened_only_when_commits_end(worker_settings, channel):
    request = new_request()
    body = f'{{"request_uuid": "{request.uuid}", "calculation_id": "C-1"}}'.encode()
    async with replicated() as servers:
        url = databases.as_role(servers.primary_url, "worker")
        settings = settings_with(worker_settings, database_url=url, database_timeout_seconds=0.2)
        async with open_pool(settings) as pool:
            async with databases.connected(servers.primary_url) as connection:
                await insert(connection, request)
            await servers.cut_off()
            await publish(channel, CALCULATION_RESULTS, body)
            consumer = calculations.consumer(settings, pool, RelayWaker(pool, seconds=5.0))

            with capture_logs() as logs:
                async with running(consumer.run):
                    await eventually(lambda: "consumer_paused" in str(logs))
                    left = await count(channel, CALCULATION_RESULTS.name)
                    await servers.admit()
                    await eventually(lambda: "message_handled" in str(logs))

    assert left == 1
    assert "consumer_started" not in str(logs[: [line["event"] for line in logs].index("consumer_paused")])
