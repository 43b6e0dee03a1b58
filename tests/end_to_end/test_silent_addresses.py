"""Servers with two addresses, the first of which does not answer: its machine hangs, or has vanished."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

import asyncpg
import pytest
import uvloop
from msgspec.structs import replace
from yarl import URL

from service.addresses import EventLoop
from service.authentication.signing_keys import SigningKeys
from service.postgres.pool import connect
from tests.end_to_end.callers import answers, create, create_if_possible
from tests.end_to_end.events import complete
from tests.harness.command_line import run
from tests.harness.databases import as_role
from tests.harness.in_process import api_client, worker_probes
from tests.harness.issuer import HttpsIssuer, status
from tests.harness.mail_server import MailServer
from tests.harness.processes import email_settings, environment_of
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from worker.mail.smtp import Mailer
from worker.rabbitmq.connection import open_connection

_NAME = "two-addresses.example.com"
_SILENT_ADDRESS = "127.0.0.2"
SILENT = pytest.mark.parametrize("accepts", [True, False], ids=["accepts connections", "drops packets"])


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


@contextmanager
def silent_server(port: int = 0, *, accepts: bool) -> Iterator[int]:
    """Listen without a word. Linux drops the packets of those who connect while the backlog is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((_SILENT_ADDRESS, port), backlog=100 * accepts))
        if not accepts:
            stack.enter_context(socket.create_connection(server.getsockname()))
        yield server.getsockname()[1]


def behind(first: int | str, url: str) -> str:
    """Return the URL of a database with another host, or a silent port, before its own."""
    host = f"{_SILENT_ADDRESS}:{first}" if isinstance(first, int) else URL(first).authority.rpartition("@")[2]
    account, _, rest = url.rpartition("@")
    return f"{account}@{host},{rest}?target_session_attrs=read-write"


@SILENT
async def test_second_host_of_postgres_serves_commands_if_the_first_is_silent(
    accepts, database_url, service_settings
):
    with silent_server(accepts=accepts) as port:
        owner, api = (
            environment_of(service_settings, DATABASE_URL=behind(port, as_role(database_url, role)))
            for role in ("owner", "api")
        )
        async with asyncio.timeout(40):
            applied = await run("service", "schema", "apply", environment=owner)
            examined = await run("service", "doctor", environment=api)

    assert (applied.status, applied.errors) == (0, "")
    assert examined.status == 0, examined.output


async def test_second_host_of_postgres_takes_over_within_seconds_if_the_first_falls_silent(
    *, service_settings, worker_settings, issuer, channel, subscriber
):
    async with TcpProxy(service_settings.database_url) as first:
        api = replace(
            service_settings,
            database_url=behind(first.url, service_settings.database_url),
            database_timeout_seconds=2.0,
        )
        worker = replace(
            worker_settings,
            database_url=behind(first.url, worker_settings.database_url),
            database_timeout_seconds=1.0,
        )
        async with worker_probes(worker) as probes, api_client(api, issuer.token()) as caller:
            await eventually(lambda: answers(probes, "/readyz", 200))
            await create(caller)
            first.hold()
            made = await eventually(lambda: create_if_possible(caller), seconds=10)
            await asyncio.gather(*(create(caller) for _ in range(20)))
            await complete(made["uuid"], channel, subscriber)
            first.resume()


@SILENT
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
        await (await connect(urls[0] + query, timeout=10.0)).close()

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


async def test_rejected_login_is_reported_although_the_first_host_is_silent(database_url):
    with silent_server(accepts=True) as port:
        url = URL(database_url).with_user("nobody").with_password("made-up")
        with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError):
            await connect(behind(port, str(url)), timeout=2.0)


async def test_socket_of_a_slow_postgres_gets_one_connection_at_a_time(tmp_path):
    opened = []
    socket_file = tmp_path / ".s.PGSQL.5432"

    async with await asyncio.start_unix_server(lambda *streams: opened.append(streams), socket_file):
        with pytest.raises(TimeoutError):
            await connect(f"postgresql://api@/?host={tmp_path}", timeout=0.5)

    assert len(opened) == 1


async def test_statement_is_cancelled_at_the_address_where_it_runs(database_url):
    async def cancel_a_statement(url: str) -> Any:
        connection = await connect(url, timeout=5.0)
        with pytest.raises(TimeoutError):
            await connection.execute("SELECT pg_sleep(60)", timeout=0.1)
        return await connection.fetchval("SELECT 'usable again'", timeout=5.0)

    async with TcpProxy(database_url) as second:
        with silent_server(second.port, accepts=True):
            outcome = cancel_a_statement(str(URL(second.url).with_host(_NAME)))
            assert await asyncio.to_thread(uvloop.run, outcome, loop_factory=_Resolving) == "usable again"
