"""Postgres, RabbitMQ, mail server and issuer must prove who they are, at the addresses on the pages."""

import re
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from yarl import URL

from deploy.local.machine.ports import free_port
from service.commands.doctor import examine_service
from tests.deploy.manifests import K8S
from tests.deploy.pages import INSTALLATION, section
from tests.harness.certificates import Authority, context_with, faulty_certificate
from tests.harness.fixed_answers import answering, http_answer
from tests.harness.mail_server import Login, MailServer
from tests.harness.processes import environment_of
from tests.harness.servers import run_as_operator
from tests.harness.tcp_proxy import TcpProxy
from worker.commands.doctor import examine_worker

_LOGIN = Login("worker", "hunter2")
# The addresses on the page and in the overlay, by scheme.
_ADDRESSES = {
    URL(address).scheme: URL(address)
    for address in (
        *re.findall("`([a-z+]+://user:password@.+?)`", section(INSTALLATION, "Installation")),
        *re.findall("_JWKS_URL=(.+)", (K8S / "overlays" / "external" / "configuration.env").read_text()),
    )
}
# What OpenSSL says of each certificate, and what doctor says of the servers that have it.
_SAYS = {
    "right": None,
    "expired": "certificate has expired",
    "of another host": "IP address mismatch, certificate is not valid for '127.0.0.1'.",
    "of another authority": "unable to get local issuer certificate",
}


def trusting(authority: Authority) -> dict[str, str]:
    """Return the variables that components/trust sets, with the file of *authority*."""
    patch = msgspec.yaml.decode((K8S / "components" / "trust" / "every-process.yaml").read_bytes())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: str(authority.file) for variable in container["env"]}


def at(scheme: str, real: str, port: int | None = None) -> str:
    """Return the address of a *real* server in the form that the page has for this scheme."""
    page, server = _ADDRESSES[scheme], URL(real)
    own = page.with_user(server.user).with_password(server.password).with_host("127.0.0.1")
    return str(own.with_port(port or server.port).with_path(server.path).with_query(page.query))


@pytest.fixture
def amqp_url(own_broker):
    """The URL of a RabbitMQ that can open further ports."""
    return own_broker.url


@pytest.fixture
async def serving(own_broker, issuer, database_url):
    """Let every server show a certificate. Returns their addresses by scheme.

    A proxy shows that of Postgres, because not every Postgres is built with TLS.
    """

    async def serve(certificate: Path) -> dict[str, str]:
        context, listener = context_with(certificate), free_port()
        options = f'[{{certfile, "{certificate}"}}, {{keyfile, "{certificate}"}}]'
        listen = f'rabbit_networking:start_ssl_listener({{"127.0.0.1", {listener}}}, {options}, 2).'
        run_as_operator(f"rabbitmqctl eval '{listen}'", own_broker)
        postgres = await stack.enter_async_context(TcpProxy(database_url, context=context))
        mail = [MailServer(scheme, context, _LOGIN) for scheme in ("smtp+starttls", "smtps")]
        for server in mail:
            await stack.enter_async_context(server)
        jwks = http_answer("200 OK", issuer.jwks.read_bytes())
        keys = await stack.enter_async_context(answering(jwks, context))
        return {
            "postgresql": at("postgresql", postgres.url),
            "amqps": at("amqps", own_broker.url, listener),
            **{URL(server.url).scheme: at(URL(server.url).scheme, server.url) for server in mail},
            "https": str(_ADDRESSES["https"].with_host("127.0.0.1").with_port(keys)),
        }

    async with AsyncExitStack() as stack:
        yield serve


@pytest.mark.parametrize("kind", _SAYS)
async def test_doctor_accepts_servers_only_with_a_valid_certificate_for_their_host_from_our_authority(
    *, kind, serving, service_settings, worker_settings, authority, tmp_path, monkeypatch
):
    """A table: each server with each certificate."""
    right = kind == "right"
    addresses = await serving(
        authority.certificate() if right else faulty_certificate(kind, authority, tmp_path)
    )
    for variable, value in trusting(authority).items():
        monkeypatch.setenv(variable, value)
    environment = environment_of(worker_settings) | environment_of(service_settings)
    environment |= {"DATABASE_URL": addresses["postgresql"], "AMQP_URL": addresses["amqps"]}
    environment |= {"AUTH_JWKS_URL": addresses["https"]}

    found = {each.check: each for each in await examine_service(environment)}
    said = {"https": found["signing keys"]}
    for scheme in ("smtp+starttls", "smtps"):
        findings = await examine_worker(environment | {"SMTP_URL": addresses[scheme]})
        found = {each.check: each for each in findings}
        said |= {scheme: found["mail server"], "postgresql": found["postgres"], "amqps": found["rabbitmq"]}

    assert said.keys() == addresses.keys()
    if right:
        assert {each.state for each in said.values()} == {"ok"}
    else:
        assert {each.state for each in said.values()} == {"wrong"}
        assert all(
            each.says.endswith(f"its certificate is not accepted: {_SAYS[kind]}") for each in said.values()
        )
