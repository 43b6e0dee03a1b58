"""Each login is replaced as deploy/operate.md says: the old and the new one work side by side.

That a process is replaced without a failed call is shown in test_gateway.py.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import asyncpg
import pytest
from yarl import URL

from deploy.local.machine.folders import CHECKOUT
from tests.deploy.pages import code_blocks
from tests.end_to_end.callers import client_of, create
from tests.end_to_end.events import complete
from tests.harness.http import bearer
from tests.harness.in_process import api_client
from tests.harness.processes import Process, api_process, started, worker_process
from tests.harness.servers import run_as_operator

_PAGE = CHECKOUT / "deploy" / "operate.md"


def with_login(url: str, user: str) -> str:
    return str(URL(url).with_user(user).with_password("made-up"))


@pytest.fixture
def amqp_url(own_broker):
    """The URL of a RabbitMQ whose users can be changed."""
    return own_broker.url


@pytest.fixture
def pods(service_settings, worker_settings, tmp_path):
    """Makes an API and a worker with these changes to their variables."""

    def make(of_api: Mapping[str, str], of_worker: Mapping[str, str]) -> tuple[Process, Process]:
        worker = worker_process(worker_settings, tmp_path, **of_worker)
        return api_process(service_settings, tmp_path, **of_api), worker

    return make


@pytest.fixture
def replaced(issuer, channel, subscriber):
    """Serves with the old processes, and in the block with the new ones instead; each completes a request."""

    async def work(api: Process) -> None:
        async with client_of(api, issuer.token()) as caller:
            await complete((await create(caller))["uuid"], channel, subscriber)

    @asynccontextmanager
    async def replace(old: tuple[Process, Process], new: tuple[Process, Process]) -> AsyncIterator[None]:
        async with started(*old):
            await work(old[0])
            async with started(*new):
                await work(old[0])
                assert await asyncio.gather(*(process.stop() for process in old)) == [0, 0]
                yield
                await work(new[0])

    return replace


def on_the_page(language: str, words: Mapping[str, str]) -> list[str]:
    """Return the commands on the page that make the new login, and those that remove the old one."""
    (block,) = code_blocks(_PAGE, "Rotation", language)
    for word, value in words.items():
        block = block.replace(word, value)
    return block.split("\n\n")


@pytest.mark.long
async def test_postgres_passwords(pods, replaced, administrator, service_settings, worker_settings):
    urls = (service_settings.database_url, worker_settings.database_url)
    groups = [str(URL(url).user) for url in urls]
    create, drop = (
        [each.replace("calculation_requests_api", group) for group in groups]
        for each in on_the_page("sql", {"…": "made-up"})
    )

    def with_second_login(number: int) -> tuple[Process, Process]:
        of_api, of_worker = (
            {"DATABASE_URL": with_login(url, f"{group}_{number}")}
            for url, group in zip(urls, groups, strict=True)
        )
        return pods(of_api, of_worker)

    for statement in create:
        await administrator.execute(statement)
        await administrator.execute(statement.replace("_2", "_1"))
    async with replaced(with_second_login(1), with_second_login(2)):
        for statement in drop:
            await administrator.execute(statement)

    for group in groups:
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(with_login(urls[0], f"{group}_1"))
        await administrator.execute(f"DROP ROLE {group}_2")


@pytest.mark.long
async def test_rabbitmq_password(pods, replaced, own_broker, amqp_url):
    words = {"PASSWORD": "made-up", "CONFIGURE": ".*", "WRITE": ".*", "READ": ".*"}
    create, drop = on_the_page("sh", words)
    for commands in (create, create.replace("relay-2", "relay")):
        await asyncio.to_thread(run_as_operator, commands, own_broker)
    old, new = (pods({}, {"AMQP_URL": with_login(amqp_url, user)}) for user in ("relay", "relay-2"))
    async with replaced(old, new):
        await asyncio.to_thread(run_as_operator, drop, own_broker)

    await asyncio.to_thread(run_as_operator, "rabbitmqctl delete_user relay-2", own_broker)


async def test_link_made_in_a_step_of_a_rotation_opens_in_the_steps_beside_it(service_settings, issuer):
    old, new = service_settings.request_secret_keys, f"new:{'C' * 43}"
    settings, token = service_settings, issuer.token()
    for before, after in ((old, f"{old},{new}"), (f"{old},{new}", f"{new},{old}")):
        async with (
            api_client(settings, token, request_secret_keys=before) as first,
            api_client(settings, token, request_secret_keys=after) as second,
        ):
            for maker, opener in ((first, second), (second, first)):
                made = await create(maker)
                opened = await opener.get(f"/v1/request/{made['uuid']}", headers=bearer(made["secret"]))
                assert opened.status_code == 200
