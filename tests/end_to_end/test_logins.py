"""Every process has its own users; logins and keys are replaced; servers prove who they are."""

import asyncio
import json
import re
import shutil
import signal
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from msgspec.structs import fields
from yarl import URL

from deploy.local.machine.folders import CHECKOUT, LOCAL
from deploy.local.machine.ports import accepts, free_port
from service.commands.doctor import examine_service
from tests.deploy.manifests import K8S, OF_RABBITMQ, of_kind
from tests.deploy.pages import INSTALLATION, code_blocks, section
from tests.end_to_end.parties import ALL_ARE_DONE, client_of, complete, create, publish_calculation
from tests.harness import processes
from tests.harness.certificates import context_with, faulty_certificate
from tests.harness.examples import A_REQUEST, CONVEYANCER, STRUCTURE
from tests.harness.http import bearer
from tests.harness.in_process import api_client, run
from tests.harness.loopback_server import AnsweringServer, http_answer
from tests.harness.mail_server import Login, MailServer
from tests.harness.processes import Process, api_process, environment_of, started, worker_process
from tests.harness.queues import holds, is_refused, read, write
from tests.harness.servers import run_as_operator
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from worker.commands.doctor import examine_worker
from worker.process import ROLES
from worker.rabbitmq import topology
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS


@pytest.fixture
def amqp_url(own_broker):
    """The URL of a RabbitMQ whose users and ports can be changed."""
    return own_broker.url


_A_USER = """
    rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"made-up">>, <<"tests">>),
    rabbit_auth_backend_internal:set_permissions(
        <<"{name}">>, <<"/">>, <<"{configure}">>, <<"{write}">>, <<"{read}">>, <<"tests">>),
"""


def with_login(url: str, user: str) -> str:
    return str(URL(url).with_user(user).with_password("made-up"))


@pytest.fixture(scope="module")
def broker_urls(own_broker):
    """The URL of each user of components/topology."""
    permissions = {
        name: {may: pattern.replace("\\", r"\\") for may, pattern in one["spec"]["permissions"].items()}
        for name, one in of_kind("production", "Permission").items()
    }
    # One call: each starts an Erlang node.
    made = "".join(_A_USER.format(name=name, **may) for name, may in permissions.items())
    run_as_operator(f"rabbitmqctl eval '{made} ok.'", own_broker)
    return {name: with_login(own_broker.url, name) for name in permissions}


async def test_chain_works_with_a_user_and_the_secrets_of_each_process(
    *, api, caller, worker_settings, broker_urls, database, environment, channel, mail_server, tmp_path
):
    of_role = {name: {each.encode_name for each in fields(role.settings)} for name, role in ROLES.items()}
    workers = []
    for role, own in of_role.items():  # The settings of the others are unset.
        unset = dict.fromkeys(set().union(*of_role.values()) - own, "")
        variables = {"AMQP_URL": broker_urls.get(role, ""), **unset}
        workers.append(worker_process(worker_settings, tmp_path, role, **variables))
    urls = {"DATABASE_URL": environment["DATABASE_URL"], "AMQP_URL": broker_urls["operator"]}
    dead = partial(holds, channel, CALCULATION_RESULTS.dead_letters, 1)
    async with started(api, *workers):
        uuid = (await create(caller))["uuid"]
        await eventually(lambda: mail_server.accepted)
        await write(channel, topology.CALCULATIONS, CALCULATION_RESULTS.routing_key)
        await eventually(dead)
        redrive = ("worker", "dead-letters", "redrive", CALCULATION_RESULTS.name)
        redriven = await run(*redrive, environment=processes.bare_environment(**urls))
        await eventually(dead)
        await publish_calculation(channel, uuid, "calc-1")
        await eventually(lambda: database.fetchval(ALL_ARE_DONE))

    assert redriven.output.startswith("1 of 1 messages moved")
    assert len(mail_server.accepted) == 1


@pytest.mark.usefixtures("channel")
@pytest.mark.parametrize("user", [*OF_RABBITMQ, "operator", "autoscaler"])
async def test_broker_refuses_a_user_what_its_process_does_not_do(broker_urls, user):
    reads = {"notifications": NOTIFICATIONS.name, "calculations": CALCULATION_RESULTS.name}.get(user)
    writers = {topology.REQUESTS: {"relay"}, topology.NOTIFICATIONS_ALONE: {"relay"}}
    writers[topology.DEAD_LETTERS] = {"notifications", "calculations"}
    attempts: list[Any] = [
        *(partial(read, queue=queue.name) for queue in topology.QUEUES if queue.name != reads),
        *(partial(write, exchange=each) for each in topology.EXCHANGES if user not in writers.get(each, ())),
        lambda ours: ours.declare_queue("of-another-team"),
        lambda ours: ours.queue_delete(NOTIFICATIONS.name),
    ]
    for attempt in attempts:
        assert await is_refused(broker_urls[user], attempt)


def on_the_page(language: str, words: dict[str, str]) -> list[str]:
    """Return the commands on the page that make the new login, and those that remove the old one."""
    (block,) = code_blocks(CHECKOUT / "deploy" / "operate.md", "Rotation", language)
    for word, value in words.items():
        block = block.replace(word, value)
    return block.split("\n\n")


@pytest.mark.long
async def test_new_logins_work_beside_the_old_ones_and_after_them(
    *, service_settings, worker_settings, administrator, own_broker, issuer, channel, subscriber, tmp_path
):
    """That a process is replaced without a failed call is shown in test_load.py."""
    urls = (service_settings.database_url, worker_settings.database_url)
    groups = [str(URL(url).user) for url in urls]
    add, drop = (
        [each.replace("calculation_requests_api", group) for group in groups]
        for each in on_the_page("sql", {"…": "made-up"})
    )
    words = {"PASSWORD": "made-up", "CONFIGURE": ".*", "WRITE": ".*", "READ": ".*"}
    add_user, drop_user = on_the_page("sh", words)

    def pods(number: int, user: str) -> tuple[Process, Process]:
        of_api, of_worker = (
            {"DATABASE_URL": with_login(url, f"{group}_{number}")}
            for url, group in zip(urls, groups, strict=True)
        )
        of_worker["AMQP_URL"] = with_login(own_broker.url, user)
        worker = worker_process(worker_settings, tmp_path, **of_worker)
        return api_process(service_settings, tmp_path, **of_api), worker

    async def work(api: Process) -> None:
        async with client_of(api, issuer.token()) as caller:
            await complete((await create(caller))["uuid"], channel, subscriber)

    for statement in add:
        await administrator.execute(statement)
        await administrator.execute(statement.replace("_2", "_1"))
    first = f"rabbitmqctl delete_user relay || true\n{add_user.replace('relay-2', 'relay')}"
    await asyncio.to_thread(run_as_operator, f"{first}\n{add_user}", own_broker)
    old, new = pods(1, "relay"), pods(2, "relay-2")
    async with started(*old):
        await work(old[0])
        async with started(*new):
            await work(old[0])
            assert await asyncio.gather(*(process.stop() for process in old)) == [0, 0]
            for statement in drop:
                await administrator.execute(statement)
            await asyncio.to_thread(run_as_operator, drop_user, own_broker)
            await work(new[0])

    for group in groups:
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(with_login(urls[0], f"{group}_1"))
        await administrator.execute(f"DROP ROLE {group}_2")
    await asyncio.to_thread(run_as_operator, "rabbitmqctl delete_user relay-2", own_broker)


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
    "right": "",
    "expired": "certificate has expired",
    "of another host": "IP address mismatch, certificate is not valid for '127.0.0.1'.",
    "of another authority": "unable to get local issuer certificate",
}


def at(scheme: str, real: str, port: int | None = None) -> str:
    """Return the address of a *real* server in the form that the page has for this scheme."""
    page, server = _ADDRESSES[scheme], URL(real)
    own = page.with_user(server.user).with_password(server.password).with_host("127.0.0.1")
    return str(own.with_port(port or server.port).with_path(server.path).with_query(page.query))


@pytest.mark.parametrize("kind", _SAYS)
async def test_doctor_accepts_servers_only_with_a_valid_certificate_for_their_host_from_our_authority(
    *, kind, own_broker, issuer, database_url, environment, worker_settings, authority, tmp_path, monkeypatch
):
    certificate = faulty_certificate(kind, authority, tmp_path) if _SAYS[kind] else authority.certificate()
    context, listener = context_with(certificate), free_port()
    options = f'[{{certfile, "{certificate}"}}, {{keyfile, "{certificate}"}}]'
    listen = f'rabbit_networking:start_ssl_listener({{"127.0.0.1", {listener}}}, {options}, 2).'
    run_as_operator(f"rabbitmqctl eval '{listen}'", own_broker)
    patch = msgspec.yaml.decode((K8S / "components" / "trust" / "every-process.yaml").read_bytes())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], str(authority.file))
    login, jwks = Login("worker", "hunter2"), http_answer("200 OK", issuer.jwks.read_bytes())
    async with (
        TcpProxy(database_url, context=context) as postgres,  # Not every Postgres has TLS.
        MailServer("smtp+starttls", context, login) as submission,
        MailServer("smtps", context, login) as smtps,
        AnsweringServer(jwks, context) as keys,
    ):
        environment |= environment_of(worker_settings)
        environment["DATABASE_URL"] = at("postgresql", postgres.url)
        environment["AMQP_URL"] = at("amqps", own_broker.url, listener)
        environment["AUTH_JWKS_URL"] = str(_ADDRESSES["https"].with_host("127.0.0.1").with_port(keys.port))
        found = {each.check: each for each in await examine_service(environment)}
        said = {"https": found["signing keys"]}
        for scheme, server in (("smtp+starttls", submission), ("smtps", smtps)):
            findings = await examine_worker(environment | {"SMTP_URL": at(scheme, server.url)})
            found = {each.check: each for each in findings}
            said |= {scheme: found["mail server"], "postgresql": found["postgres"]}
            said["amqps"] = found["rabbitmq"]

    assert said.keys() == _ADDRESSES.keys()
    assert {each.state for each in said.values()} == {"wrong" if _SAYS[kind] else "ok"}
    refused = f"its certificate is not accepted: {_SAYS[kind]}"
    assert not _SAYS[kind] or all(each.says.endswith(refused) for each in said.values())


_NODE_MODULES = LOCAL / "node" / "node_modules"
_RESOURCE = "https://calculations.example.com"  # RFC 8707 asks for a URI
_SECRET = "hunter2"  # of the only client, CONVEYANCER


def write_key(file: Path) -> None:
    key = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()), as_dict=True)
    file.write_text(json.dumps({"keys": [{**key, "use": "sig", "alg": "ES256"}]}))


@pytest.fixture
def provider(authority, tmp_path):
    """A real authorization server, not yet started: npm's, which has the OpenID Foundation's certificates.

    With PyPI's Authlib, the test would have to bring the endpoints, and the publication of the keys, itself.
    """
    node, port = shutil.which("node"), free_port()
    if node is None or not (_NODE_MODULES / "oidc-provider").exists():
        pytest.skip("oidc-provider is not installed: `make test-long` installs it if there is node")
    write_key(tmp_path / "keys.json")
    program = Path(__file__).with_name("authorization_server.cjs")
    files = program, str(port), authority.certificate(), tmp_path / "keys.json"
    environment = processes.bare_environment(NODE_PATH=str(_NODE_MODULES))
    command = [node, *files, _RESOURCE, CONVEYANCER, _SECRET]
    return Process("oidc-provider", command, environment=environment, port=port, folder=tmp_path)


@pytest.mark.long
async def test_token_opens_what_its_scopes_allow_also_after_a_rotation_and_an_opaque_one_gets_401(
    provider, authority, service_settings, tmp_path
):
    url, trust = f"https://127.0.0.1:{provider.port}", ssl.create_default_context(cafile=authority.file)
    server = httpx.AsyncClient(base_url=url, auth=(CONVEYANCER, _SECRET), verify=trust, timeout=30.0)

    async def token(**form: str) -> str:
        """Return a new access token of CONVEYANCER, by the client-credentials grant."""
        response = await server.post("/token", data={"grant_type": "client_credentials", **form})
        assert response.status_code == 200, response.text
        return str(response.json()["access_token"])

    async def answers_to(**form: str) -> list[httpx.Response]:
        client.headers.update(bearer(await token(**form)))
        create = await client.post("/v1/request", json=A_REQUEST)
        return [create, await client.get("/v1/request"), await client.get(STRUCTURE)]

    async def new_key_is_accepted() -> bool:
        if (await server.get("/jwks")).content == published:
            return False
        client.headers.update(bearer(await token(resource=_RESOURCE, scope="request:read")))
        return bool((await client.get("/v1/request")).is_success)

    async with server, started(provider, ready=False):
        await eventually(lambda: accepts(provider.port))
        metadata: dict[str, Any] = (await server.get("/.well-known/openid-configuration")).json()
        found = {"auth_issuer": metadata["issuer"], "auth_jwks_url": metadata["jwks_uri"]}
        async with api_client(service_settings, None, auth_audience=_RESOURCE, **found) as client:
            reading, writing = [
                await answers_to(resource=_RESOURCE, scope=f"request:{name}") for name in ("read", "write")
            ]
            opaque = await answers_to(scope="request:read")
            published = (await server.get("/jwks")).content
            write_key(tmp_path / "keys.json")
            provider.running.send_signal(signal.SIGHUP)
            await eventually(new_key_is_accepted)

    statuses = [[each.status_code for each in answers] for answers in (reading, writing, opaque)]
    assert statuses == [[403, 200, 200], [200, 403, 200], [401, 401, 401]]
    cause = "The token is no JWT, as access tokens are"
    assert all(cause in each.headers["WWW-Authenticate"] for each in opaque)
