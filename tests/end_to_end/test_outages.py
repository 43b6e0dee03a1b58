"""Outages of RabbitMQ and Postgres, and the recovery."""

import asyncio

import pytest
from msgspec.structs import replace

from service.authentication import api_keys
from tests.end_to_end.callers import (
    another_request,
    answers,
    become_alive_but_not_ready,
    create,
    create_if_possible,
)
from tests.end_to_end.events import complete
from tests.harness import databases
from tests.harness.examples import CONVEYANCER
from tests.harness.in_process import api_and_probes, api_client, worker_probes
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually

_REQUESTS = 20  # during an outage


async def unreachable(network: TcpProxy) -> None:
    """Let connecting fail, and cut the open connections."""
    network.stop_listening()
    await network.cut()


async def silent(network: TcpProxy) -> None:
    """Accept connections and keep them open, but forward nothing."""
    network.hold()


async def restore(network: TcpProxy) -> None:
    network.resume()
    await network.start()


OUTAGES = pytest.mark.parametrize("outage", [unreachable, silent])


@OUTAGES
async def test_api_works_without_the_broker_and_all_is_delivered_when_it_is_back(
    *, outage, service_settings, worker_settings, issuer, subscriber, mail_server, database
):
    async with TcpProxy(worker_settings.amqp_url) as network:
        settings = replace(worker_settings, amqp_url=network.url, broker_timeout_seconds=1.0)
        async with api_client(service_settings, issuer.token()) as client, worker_probes(settings) as worker:
            await eventually(lambda: answers(worker, "/readyz", 200))
            await outage(network)
            await become_alive_but_not_ready(worker)
            await asyncio.gather(*(create(client) for _ in range(_REQUESTS)))
            held = await database.fetchval("SELECT count(*) FROM outbox WHERE next_attempt_at IS NOT NULL")
            await restore(network)
            await eventually(lambda: len(subscriber.event_ids) == 2 * _REQUESTS)
            await eventually(lambda: answers(worker, "/readyz", 200))

    assert held == 0, "an attempt was counted during an outage"
    assert len(mail_server.accepted) == _REQUESTS


@OUTAGES
async def test_both_start_without_postgres_say_so_in_time_when_it_is_away_and_recover_by_themselves(
    *, outage, service_settings, worker_settings, issuer, database, channel, subscriber
):
    key = {"Authorization": f"Bearer {await api_keys.create(database, CONVEYANCER)}"}
    async with TcpProxy(service_settings.database_url) as network:
        api = replace(service_settings, database_url=network.url, database_timeout_seconds=2.0)
        url = databases.as_role(network.url, "worker")
        settings = replace(worker_settings, database_url=url, database_timeout_seconds=1.0)
        await outage(network)
        async with (
            worker_probes(settings) as worker,
            api_and_probes(api, issuer.token()) as (caller, probes),
        ):
            await become_alive_but_not_ready(probes, worker)
            await restore(network)
            await eventually(lambda: answers(probes, "/readyz", 200))
            await eventually(lambda: answers(worker, "/readyz", 200))
            before = await eventually(lambda: create_if_possible(caller))
            await complete(before["uuid"], channel, subscriber)
            await outage(network)
            responses = await asyncio.gather(
                caller.post("/v1/request", json=another_request()),
                caller.get(f"/v1/request/{before['uuid']}"),
                caller.get("/v1/questionnaire/structure", headers=key),
            )
            questionnaire = await caller.get("/v1/questionnaire/structure")
            api_ready = await probes.get("/readyz")
            await become_alive_but_not_ready(worker)
            await restore(network)
            await eventually(lambda: answers(caller, f"/v1/request/{before['uuid']}", 200))
            await eventually(lambda: answers(worker, "/readyz", 200))
            after = await eventually(lambda: create_if_possible(caller))
            await complete(after["uuid"], channel, subscriber)

    assert questionnaire.status_code == 200, "an access token needs no Postgres"
    assert api_ready.status_code == 200, "callers would get the ingress's answer"
    assert api_ready.json()["postgres"].startswith("Postgres is unreachable")
    for response in responses:
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert response.elapsed.total_seconds() < 10  # It has a deadline, of two seconds.
        assert [error["code"] for error in response.json()["errors"]] == ["unavailable"]
