"""The whole chain over TLS; a Postgres or a broker with a wrong certificate gets no login."""

import httpx
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs
from yarl import URL

from tests.end_to_end.callers import client_of, create
from tests.end_to_end.events import complete
from tests.harness import databases
from tests.harness.certificates import FAULTS, Authority, faulty_context
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client
from tests.harness.mail_server import Login, MailServer
from tests.harness.processes import api_process, started, worker_process
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from worker.rabbitmq.connection import BrokerUnavailable, open_channel

_LOGIN = Login("worker", "hunter2")


def verifying(database_url: str, authority: Authority) -> str:
    """Return the URL with which a process accepts only the certificate of *authority* for the host."""
    return str(URL(database_url).update_query(sslmode="verify-full", sslrootcert=str(authority.file)))


def trusting(amqp_url: str, authority: Authority) -> str:
    """Return the URL with which a worker trusts *authority*, as in the manifests."""
    return str(URL(amqp_url).update_query(cafile=str(authority.file)))


async def test_request_gets_its_email_and_its_calculation_over_tls(
    *, service_settings, worker_settings, authority, issuer, channel, subscriber, tmp_path
):
    """The whole chain, once; no connection goes without TLS."""
    context = authority.server_context()
    async with (
        TcpProxy(service_settings.database_url, context=context) as postgres,
        TcpProxy(worker_settings.amqp_url, context=context) as broker,
        MailServer("smtp+starttls", context, _LOGIN) as mail_server,
    ):
        database = {"DATABASE_URL": verifying(postgres.url, authority)}
        others = {"AMQP_URL": trusting(broker.url, authority), "SMTP_URL": mail_server.url}
        api = api_process(service_settings, tmp_path, **database)
        authorities = {"SSL_CERT_FILE": str(authority.file)}
        others["DATABASE_URL"] = databases.as_role(database["DATABASE_URL"], "worker")
        worker = worker_process(worker_settings, tmp_path, **others, **authorities)
        async with started(api, worker), client_of(api, issuer.token()) as caller:
            await complete((await create(caller))["uuid"], channel, subscriber)

    assert len(mail_server.accepted) == mail_server.logins == 1
    assert "listener_paused" not in worker.output, "the listener has a connection of its own"


async def is_stored(client: httpx.AsyncClient) -> bool:
    return (await client.post("/v1/request", json=A_REQUEST)).status_code == 200


@pytest.mark.parametrize("fault", FAULTS)
async def test_postgres_with_a_bad_certificate_gets_no_login_and_callers_get_503_until_it_is_renewed(
    fault, service_settings, authority, issuer, tmp_path
):
    context = faulty_context(fault, authority, tmp_path)
    async with TcpProxy(service_settings.database_url, context=context) as postgres:
        settings = replace(service_settings, database_url=verifying(postgres.url, authority))
        with capture_logs() as logs:
            async with api_client(settings, issuer.token()) as client:
                answer = await client.post("/v1/request", json=A_REQUEST)
                ready = await client.get("/readyz")
                logins = postgres.connections
                postgres.context = authority.server_context()
                await eventually(lambda: is_stored(client))

    assert (answer.status_code, ready.status_code) == (503, 503)
    assert logins == 0
    assert "SSLCertVerificationError" in str(logs)


@pytest.mark.parametrize("fault", FAULTS)
async def test_broker_with_a_bad_certificate_gets_no_login(fault, worker_settings, authority, tmp_path):
    context = faulty_context(fault, authority, tmp_path)
    async with TcpProxy(worker_settings.amqp_url, context=context) as broker:
        settings = replace(worker_settings, amqp_url=trusting(broker.url, authority))
        with pytest.raises(BrokerUnavailable) as refused:
            async with open_channel(settings, name="test"):
                pass

    assert broker.connections == 0
    assert "CERTIFICATE_VERIFY_FAILED" in repr(refused.value.__cause__)
