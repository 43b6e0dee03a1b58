"""The whole chain over TLS; a Postgres or a broker with a wrong certificate gets no login."""

import asyncio

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs
from yarl import URL

from service.settings import ServiceSettings
from tests.end_to_end.callers import answers, become_alive_but_not_ready, client_of, create
from tests.end_to_end.events import complete
from tests.harness.certificates import FAULTS, Authority, faulty_context
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client, worker_probes
from tests.harness.issuer import Issuer
from tests.harness.mail_server import Login, MailServer
from tests.harness.processes import api_process, started, worker_process
from tests.harness.tcp_proxy import POSTGRES_TLS_REQUEST, TcpProxy
from tests.harness.waiting import eventually
from worker.rabbitmq.connection import BrokerUnavailable, open_channel
from worker.settings import WorkerSettings

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
        worker = worker_process(worker_settings, tmp_path, **database, **others, **authorities)
        async with started(api, worker), client_of(api, issuer.token()) as caller:
            created = await create(caller)
            uuid = created["uuid"]
            await complete(uuid, channel, subscriber)
            read_back = (await caller.get(f"/v1/request/{uuid}")).json()["data"]

    events = subscriber.about(uuid)
    assert [(event["type"], event["data"]["sequence"]) for event in events] == [
        ("request.created", 1),
        ("request.email_sent", 2),
        ("request.calculated", 3),
    ]
    assert events[2]["data"]["calculation_id"] == "calc-1"
    assert read_back == created | {"calculation_id": "calc-1", "updated_at": events[2]["time"]}
    (mail,) = mail_server.accepted
    assert mail.recipients == [created["customer_email"]]
    text = mail.message.get_body(("plain",))
    assert text is not None
    assert created["request_url"] in text.get_content().splitlines()
    assert mail_server.logins == 1
    assert "listener_paused" not in worker.output, "the listener has a connection of its own"


@pytest.mark.parametrize("fault", FAULTS)
async def test_postgres_with_a_bad_certificate_gets_no_login_and_callers_get_503(
    fault, service_settings, authority, issuer, tmp_path
):
    context = faulty_context(fault, authority, tmp_path)
    async with TcpProxy(service_settings.database_url, context=context) as postgres:
        settings = replace(service_settings, database_url=verifying(postgres.url, authority))
        with capture_logs() as logs:
            await _assert_unavailable(settings, issuer)

    assert postgres.connections == 0
    assert "SSLCertVerificationError" in str(logs)


async def test_worker_waits_until_the_certificate_of_postgres_is_renewed(worker_settings, authority):
    expired = TcpProxy(worker_settings.database_url, context=authority.server_context(days=-1))
    async with expired as postgres:
        settings = replace(worker_settings, database_url=verifying(postgres.url, authority))
        async with worker_probes(settings) as worker:
            await become_alive_but_not_ready(worker)
            postgres.context = authority.server_context()
            await eventually(lambda: answers(worker, "/readyz", 200))


async def test_postgres_that_declines_tls_gets_no_login(service_settings, authority, issuer):
    """Somebody on the way may decline in its name."""
    sent = []

    async def decline(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(await reader.read(len(POSTGRES_TLS_REQUEST)))
        writer.write(b"N")
        sent.append(await reader.read())
        writer.close()

    async with await asyncio.start_server(decline, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = str(URL(service_settings.database_url).with_host("127.0.0.1").with_port(port))
        await _assert_unavailable(replace(service_settings, database_url=verifying(url, authority)), issuer)

    assert set(sent) == {POSTGRES_TLS_REQUEST, b""}


async def _assert_unavailable(settings: ServiceSettings, issuer: Issuer) -> None:
    async with api_client(settings, issuer.token()) as client:
        answer = await client.post("/v1/request", json=A_REQUEST)
        ready = await client.get("/readyz")

    assert (answer.status_code, ready.status_code) == (503, 503)
    assert answer.headers["Retry-After"] == "1"


@pytest.mark.parametrize("fault", FAULTS)
async def test_broker_with_a_bad_certificate_gets_no_login(fault, worker_settings, authority, tmp_path):
    context = faulty_context(fault, authority, tmp_path)
    async with TcpProxy(worker_settings.amqp_url, context=context) as broker:
        with pytest.raises(BrokerUnavailable) as refused:
            await _connect(worker_settings, trusting(broker.url, authority))

    assert broker.connections == 0
    assert "CERTIFICATE_VERIFY_FAILED" in repr(refused.value.__cause__)


async def test_broker_without_tls_gets_no_login(worker_settings, authority):
    sent: list[bytes] = []
    async with TcpProxy(worker_settings.amqp_url, lambda: sent.append) as broker:
        url = str(URL(broker.url).with_scheme("amqps"))
        with pytest.raises(BrokerUnavailable):
            await _connect(worker_settings, trusting(url, authority))

    assert sent != []
    assert b"PLAIN" not in b"".join(sent)


async def _connect(settings: WorkerSettings, amqp_url: str) -> None:
    async with open_channel(replace(settings, amqp_url=amqp_url), name="test"):
        pass
