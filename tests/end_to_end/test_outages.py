"""Outages of RabbitMQ, the mail server, Postgres and the issuer's keys, and the recovery."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from aio_pika.abc import AbstractChannel
from msgspec.structs import replace

from service.authentication import api_keys, signing_keys
from tests.end_to_end.callers import another_request, answers, become_alive_but_not_ready, create, create_many
from tests.end_to_end.events import Subscriber, publish_calculation
from tests.harness.examples import CONVEYANCER
from tests.harness.in_process import api_client, worker_probes
from tests.harness.issuer import HttpsIssuer, status
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually

Outage = Callable[[TcpProxy], Awaitable[None]]


async def unreachable(network: TcpProxy) -> None:
    """Let connecting fail, and cut the open connections."""
    await network.stop_listening()
    await network.cut()


async def silent(network: TcpProxy) -> None:
    """Accept connections and keep them open, but forward nothing."""
    network.hold()


async def restore(network: TcpProxy) -> None:
    """End either outage."""
    network.resume()
    await network.listen()


OUTAGES = pytest.mark.parametrize("outage", [unreachable, silent])

_REQUESTS = 20  # before the outage, and during it


@OUTAGES
async def test_api_works_without_the_broker_and_all_is_delivered_when_it_is_back(
    *, outage, client, worker_settings, subscriber, mail_server, database
):
    async with TcpProxy(worker_settings.amqp_url) as network:
        settings = replace(worker_settings, amqp_url=network.url, broker_timeout_seconds=1.0)
        async with worker_probes(settings) as worker:
            await eventually(lambda: answers(worker, "/readyz", 200))
            await create_many(client, _REQUESTS)
            await outage(network)
            await become_alive_but_not_ready(worker)
            await create_many(client, _REQUESTS)
            api_ready = await answers(client, "/readyz", 200)
            waiting = await database.fetchval("SELECT count(*) FROM outbox")
            held = await database.fetchval("SELECT count(*) FROM outbox_held")
            await restore(network)
            await eventually(lambda: len(subscriber.event_ids) == 4 * _REQUESTS)
            await eventually(lambda: answers(worker, "/readyz", 200))

    assert api_ready
    assert waiting >= _REQUESTS
    assert held == 0, "an attempt was counted during an outage"
    assert len(mail_server.accepted) == 2 * _REQUESTS


@pytest.fixture
async def network(database_url):
    """The network between the processes and Postgres."""
    async with TcpProxy(database_url) as proxy:
        yield proxy


@pytest.fixture
def remote_api(service_settings, network):
    """Settings of an API with a network between itself and Postgres."""
    return replace(service_settings, database_url=network.url, database_timeout_seconds=2.0)


@pytest.fixture
def remote_worker(worker_settings, network):
    """Settings of a worker with a network between itself and Postgres."""
    return replace(worker_settings, database_url=network.url, database_timeout_seconds=1.0)


@OUTAGES
async def test_both_start_without_postgres_say_so_in_time_when_it_is_away_and_recover_by_themselves(
    *, outage, network, remote_api, remote_worker, issuer, database, channel, subscriber
):
    api_key = await api_keys.create(database, CONVEYANCER)
    await outage(network)
    async with worker_probes(remote_worker) as worker, api_client(remote_api, issuer.token()) as caller:
        await become_alive_but_not_ready(caller, worker)
        await restore(network)
        await eventually(lambda: answers(caller, "/readyz", 200))
        await eventually(lambda: answers(worker, "/readyz", 200))
        before = await create(caller)
        await _completes(before["uuid"], channel, subscriber)
        await outage(network)
        responses = await asyncio.gather(
            caller.post("/v1/request", json=another_request()),
            caller.get(f"/v1/request/{before['uuid']}"),
            caller.get("/v1/questionnaire/structure", headers={"Authorization": f"Bearer {api_key}"}),
        )
        questionnaire = await caller.get("/v1/questionnaire/structure")
        api_ready = await caller.get("/readyz")
        await become_alive_but_not_ready(worker)
        await restore(network)
        await eventually(lambda: answers(caller, f"/v1/request/{before['uuid']}", 200))
        await eventually(lambda: answers(worker, "/readyz", 200))
        after = await create(caller)
        await _completes(after["uuid"], channel, subscriber)

    assert questionnaire.status_code == 200, "an access token needs no Postgres"
    assert api_ready.status_code == 200, "callers would get the ingress's answer"
    for response in responses:
        _assert_unavailable(response)


async def _completes(uuid: str, channel: AbstractChannel, subscriber: Subscriber) -> None:
    """Wait until a request has gone through its whole chain."""
    await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
    await publish_calculation(channel, uuid, "calc-1")
    await eventually(lambda: "request.calculated" in subscriber.types(uuid))


def _assert_unavailable(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) >= 1
    assert response.elapsed.total_seconds() < 10  # It has a deadline, of two seconds.
    answer = response.json()
    assert answer["status"] == {"code": 503, "message": "Service Unavailable"}
    assert answer["data"] is None
    assert [error["code"] for error in answer["errors"]] == ["unavailable"]


@pytest.fixture
async def key_server(authority, own_issuer):
    """The issuer's key server, down, with a fixed port."""
    server = HttpsIssuer(authority)
    server.answer = status(200, own_issuer.jwks.read_bytes())
    async with server.up():
        return server


@pytest.fixture
def dependent_api(service_settings, key_server, monkeypatch):
    """Settings of an API that fetches the issuer's keys from that server five times a second."""
    for pause in ("_REFRESH_SECONDS", "_COOLDOWN_SECONDS", "_INTERVAL_SECONDS"):
        monkeypatch.setattr(signing_keys, pause, 0.2)
    return replace(service_settings, auth_jwks_url=key_server.url)


async def test_api_that_starts_without_the_issuers_keys_says_so_until_it_gets_them(
    *, dependent_api, key_server, own_issuer, database
):
    api_key = await api_keys.create(database, CONVEYANCER)
    async with api_client(dependent_api, own_issuer.token()) as caller:
        responses = await asyncio.gather(
            caller.post("/v1/request", json=another_request()),
            caller.get("/v1/questionnaire/structure"),
        )
        with_api_key = await caller.get(
            "/v1/questionnaire/structure", headers={"Authorization": f"Bearer {api_key}"}
        )
        async with key_server.up():
            await eventually(lambda: answers(caller, "/v1/questionnaire/structure", 200))
            await create(caller)

    assert with_api_key.status_code == 200
    for response in responses:
        _assert_unavailable(response)
