"""RabbitMQ or Postgres is away, or only its first address: what works meanwhile, and the recovery."""

import asyncio
import socket
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

import asyncpg
import pytest
import uvloop
from msgspec.structs import replace
from yarl import URL

from service.addresses import EventLoop
from service.authentication import api_keys
from service.authentication.signing_keys import SigningKeys
from service.postgres.pool import connect
from tests.end_to_end.parties import answers, become_alive_but_not_ready, complete, create, create_if_possible
from tests.harness.databases import as_role
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.http import bearer
from tests.harness.in_process import api_and_probes, api_client, run, worker_probes
from tests.harness.issuer import HttpsIssuer, status
from tests.harness.mail_server import MailServer
from tests.harness.processes import email_settings, environment_of
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from worker.mail.smtp import Mailer
from worker.rabbitmq.connection import open_connection

_REQUESTS = 20  # during an outage
_NAME = "two-addresses.example.com"
_SILENT_ADDRESS = "127.0.0.2"


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
            await asyncio.gather(*(create(client) for _ in range(_REQUESTS)))
            await become_alive_but_not_ready(worker)
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
    key = bearer(await api_keys.create(database, CONVEYANCER))
    async with TcpProxy(service_settings.database_url) as network:
        api = replace(service_settings, database_url=network.url, database_timeout_seconds=2.0)
        url = as_role(network.url, "worker")
        settings = replace(worker_settings, database_url=url, database_timeout_seconds=1.0)

        async def recover() -> str:
            """Wait until both work again; return the uuid of a request that has gone through both."""
            await restore(network)
            for each in (probes, worker):
                await eventually(lambda: answers(each, "/readyz", 200))  # noqa: B023 - awaited here
            uuid = (await eventually(lambda: create_if_possible(caller)))["uuid"]
            await complete(uuid, channel, subscriber)
            return str(uuid)

        await outage(network)
        async with worker_probes(settings) as worker, api_and_probes(api, issuer.token()) as (caller, probes):
            await become_alive_but_not_ready(probes, worker)
            uuid = await recover()
            await outage(network)
            responses = await asyncio.gather(
                caller.post("/v1/request", json=A_REQUEST),
                caller.get(f"/v1/request/{uuid}"),
                caller.get("/v1/questionnaire/structure", headers=key),
            )
            questionnaire = await caller.get("/v1/questionnaire/structure")
            api_ready = await probes.get("/readyz")
            await become_alive_but_not_ready(worker)
            await recover()

    assert questionnaire.status_code == 200, "an access token needs no Postgres"
    assert api_ready.status_code == 200, "callers would get the ingress's answer"
    assert api_ready.json()["postgres"].startswith("Postgres is unreachable")
    for response in responses:
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert response.elapsed.total_seconds() < 10  # It has a deadline, of two seconds.
        assert [error["code"] for error in response.json()["errors"]] == ["unavailable"]


async def test_second_host_of_postgres_takes_over_within_seconds_if_the_first_falls_silent(
    *, service_settings, worker_settings, issuer, channel, subscriber
):
    async with TcpProxy(service_settings.database_url) as first:

        def behind(url: str) -> str:
            """Return the URL of a database with another host and port before its own."""
            account, _, rest = url.rpartition("@")
            return f"{account}@127.0.0.1:{first.port},{rest}?target_session_attrs=read-write"

        api, worker = (
            replace(each, database_url=behind(each.database_url), database_timeout_seconds=seconds)
            for each, seconds in ((service_settings, 2.0), (worker_settings, 1.0))
        )
        worker = replace(worker, broker_timeout_seconds=2.0)  # A pass of the relay has twice both timeouts.
        stranger = URL(service_settings.database_url).with_user("nobody").with_password("made-up")
        async with worker_probes(worker) as probes, api_client(api, issuer.token()) as caller:
            await eventually(lambda: answers(probes, "/readyz", 200))
            await create(caller)
            first.hold()
            made = await eventually(lambda: create_if_possible(caller), seconds=10)
            await asyncio.gather(*(create(caller) for _ in range(20)))
            await complete(made["uuid"], channel, subscriber)
            with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError):
                await connect(behind(str(stranger)), timeout=5.0)
            examined = await run("service", "doctor", environment=environment_of(api))
            first.resume()

    assert examined.status == 0, examined.output


@contextmanager
def silent_server(port: int, *, accepts: bool):
    """Listen without a word. Linux drops the packets of those who connect while the backlog is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((_SILENT_ADDRESS, port), backlog=100 * accepts))
        if not accepts:
            stack.enter_context(socket.create_connection(server.getsockname()))
        yield


class _Resolving(EventLoop):
    """An event loop that finds two addresses for _NAME."""

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        if host not in (_NAME, _NAME.encode()):
            return await super().getaddrinfo(host, port, **options)
        found = [
            await super(_Resolving, self).getaddrinfo(each, port, **options)
            for each in (_SILENT_ADDRESS, "127.0.0.1")
        ]
        return [first for first, *_ in found]


@pytest.mark.parametrize("accepts", [True, False], ids=["accepts connections", "drops packets"])
async def test_second_address_of_a_name_is_reached_and_proves_the_name_if_the_first_is_silent(
    *, accepts, authority, database_url, amqp_url, own_issuer
):
    context = authority.server_context(address=_NAME)
    https = HttpsIssuer(authority, address=_NAME)
    https.answer = status(200, own_issuer.jwks.read_bytes())
    postgres, broker = TcpProxy(database_url, context=context), TcpProxy(amqp_url, context=context)
    servers = (postgres, broker, MailServer("smtps", context), https)
    urls = [str(URL(server.url).with_host(_NAME)) for server in servers]

    async def reach_postgres() -> None:
        query = f"?sslmode=verify-full&sslrootcert={authority.file}"
        connection = await connect(urls[0] + query, timeout=10.0)
        with pytest.raises(TimeoutError):  # The statement is cancelled at the address where it runs.
            await connection.execute("SELECT pg_sleep(60)", timeout=0.1)
        assert await connection.fetchval("SELECT 'usable again'", timeout=5.0) == "usable again"
        await connection.close()

    async def reach_broker() -> None:
        async with open_connection(urls[1], name="", seconds=10.0):
            pass

    async def reach_mail_server() -> None:
        (await Mailer(email_settings(smtp_url=urls[2])).connect()).close()

    async def reach_all() -> Any:
        reached = (reach_postgres(), reach_broker(), reach_mail_server(), SigningKeys(urls[3]).refresh())
        async with asyncio.timeout(20):
            return await asyncio.gather(*reached, return_exceptions=True)

    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
            stack.enter_context(silent_server(server.port, accepts=accepts))
        outcomes = await asyncio.to_thread(uvloop.run, reach_all(), loop_factory=_Resolving)

    assert outcomes == [None] * 4


async def test_socket_of_a_slow_postgres_gets_one_connection_at_a_time(tmp_path):
    opened = []
    socket_file = tmp_path / ".s.PGSQL.5432"

    async with await asyncio.start_unix_server(lambda _, writer: opened.append(writer), socket_file):
        with pytest.raises(TimeoutError):
            await connect(f"postgresql://api@/?host={tmp_path}", timeout=0.5)
        (writer,) = opened
        writer.close()
