"""Every process has its own users and no other secret; logins are replaced; servers prove who they are."""

import asyncio
import re
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import asyncpg
import msgspec
import pytest
from msgspec.structs import fields
from yarl import URL

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from service.commands.doctor import examine_service
from tests.deploy.manifests import K8S, OF_RABBITMQ, of_kind
from tests.deploy.pages import INSTALLATION, code_blocks, section
from tests.end_to_end.parties import ALL_ARE_DONE, client_of, complete, create, publish_calculation
from tests.harness import processes
from tests.harness.certificates import Authority, context_with, faulty_certificate
from tests.harness.command_line import run
from tests.harness.fixed_answers import answering, http_answer
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


def not_for(role: str) -> dict[str, str]:
    """Return the settings that a role does not get, unset."""
    of_role = {name: {each.encode_name for each in fields(ROLES[name].settings)} for name in ROLES}
    return dict.fromkeys(set().union(*of_role.values()) - of_role[role], "")


async def test_chain_works_with_a_user_and_the_secrets_of_each_process(
    *, api, caller, worker_settings, broker_urls, database, environment, channel, mail_server, tmp_path
):
    workers = [
        worker_process(
            worker_settings, tmp_path, role, **({"AMQP_URL": broker_urls.get(role, "")} | not_for(role))
        )
        for role in ROLES
    ]
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
    consumers = {"notifications", "calculations"}
    writers = {
        topology.REQUESTS: {"relay"},
        topology.NOTIFICATIONS_ALONE: {"relay"},
        topology.DEAD_LETTERS: consumers,
    }
    for attempt in (
        *(partial(read, queue=queue.name) for queue in topology.QUEUES if queue.name != reads),
        *(partial(write, exchange=each) for each in topology.EXCHANGES if user not in writers.get(each, ())),
        lambda ours: ours.declare_queue("of-another-team"),
        lambda ours: ours.queue_delete(NOTIFICATIONS.name),
    ):
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
    """That a process is replaced without a failed call is shown in test_gateway.py."""
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
        login = Login("worker", "hunter2")
        mail = [MailServer(scheme, context, login) for scheme in ("smtp+starttls", "smtps")]
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
    is_right = kind == "right"
    certificate = authority.certificate() if is_right else faulty_certificate(kind, authority, tmp_path)
    addresses = await serving(certificate)
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
    assert {each.state for each in said.values()} == {"ok" if is_right else "wrong"}
    refused = f"its certificate is not accepted: {_SAYS[kind]}"
    assert is_right or all(each.says.endswith(refused) for each in said.values())
