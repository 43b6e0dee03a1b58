"""Each secret is replaced as deploy/operate.md says, while callers call and customers open their links."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import httpx
import pytest
from yarl import URL

from deploy.local.machine.folders import CHECKOUT
from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.deploy.pages import code_blocks
from tests.end_to_end.callers import another_request, client_of
from tests.end_to_end.events import ALL_ARE_DONE
from tests.harness.http import bearer
from tests.harness.processes import api_process, started, worker_process
from tests.harness.servers import run_as_operator
from tests.harness.waiting import eventually
from worker.settings import WorkerSettings

pytestmark = pytest.mark.long

_PAGE = CHECKOUT / "deploy" / "operate.md"
_CALLERS = 4
_ALL_IS_DONE = ALL_ARE_DONE.replace("calculation_id IS NULL OR sequence < 3", "sequence < 2")
_AFTER = 20  # calls that must be answered after the last step


@dataclass
class Installation:
    """An API and a worker that are replaced as in a rollout, and callers that never stop."""

    settings: ServiceSettings
    worker_settings: WorkerSettings
    database: Connection
    folder: Path
    token: str
    secret: dict[str, str] = field(default_factory=dict)  # variables of the Kubernetes Secret
    # Makes the DATABASE_URL of a process from the one in its settings.
    database_url: Callable[[str], str] = str
    statuses: Counter[int | str] = field(default_factory=Counter)
    request_secrets: list[tuple[str, str]] = field(default_factory=list)
    # The present processes with their callers, and what ends these callers.
    pods: AsyncExitStack = field(default_factory=AsyncExitStack)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve callers and customers until the block is left, and finish all work."""
        await self.replace_pods()
        try:
            yield
            answered = self.statuses.total()
            await eventually(lambda: self.statuses.total() >= answered + _AFTER)
            self.is_over.set()
            await eventually(lambda: self.database.fetchval(_ALL_IS_DONE))
        finally:
            await self.pods.aclose()

    async def replace_pods(self) -> None:
        """Start new processes with the secret as it is now, then stop the old ones, as a rollout does."""
        old, new, is_over = self.pods, AsyncExitStack(), asyncio.Event()
        await new.enter_async_context(self._called(is_over))
        self.pods, self.is_over = new, is_over
        await old.aclose()

    @asynccontextmanager
    async def _called(self, is_over: asyncio.Event) -> AsyncIterator[None]:
        """Run processes and callers. At the end no call arrives any more, as after the preStop hook."""
        of_api, of_worker = (
            {"DATABASE_URL": self.database_url(each.database_url), **self.secret}
            for each in (self.settings, self.worker_settings)
        )
        api = api_process(self.settings, self.folder, **of_api)
        worker = worker_process(self.worker_settings, self.folder, **of_worker)
        async with (
            started(api, worker),
            client_of(api, self.token) as client,
            asyncio.TaskGroup() as callers,
        ):
            for _ in range(_CALLERS):
                callers.create_task(self._call(client, is_over))
            yield
            is_over.set()

    async def _call(self, client: httpx.AsyncClient, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            created = await self._answer(client.post("/v1/request", json=another_request()))
            if created:
                request = created.json()["data"]
                self.request_secrets.append((request["uuid"], request["secret"]))
            for uuid, secret in (self.request_secrets[0], self.request_secrets[-1]):
                await self._answer(client.get(f"/v1/request/{uuid}", headers=bearer(secret)))
            await asyncio.sleep(0.05)

    async def _answer(self, call: Awaitable[httpx.Response]) -> httpx.Response | None:
        try:
            response = await call
        except httpx.TransportError as error:
            self.statuses[repr(error)] += 1
            return None
        self.statuses[response.status_code] += 1
        return response if response.status_code == 200 else None


def with_login(url: str, user: str, password: str) -> str:
    return str(URL(url).with_user(user).with_password(password))


@pytest.fixture
def amqp_url(own_broker):
    """The URL of a RabbitMQ whose users can be changed."""
    return own_broker.url


@pytest.fixture
def installation(service_settings, worker_settings, database, tmp_path, issuer):
    return Installation(service_settings, worker_settings, database, tmp_path, issuer.token())


def on_the_page(language: str, words: Mapping[str, str]) -> list[str]:
    """Return the commands on the page that make the new login, and those that remove the old one."""
    (block,) = code_blocks(_PAGE, "Rotation", language)
    for word, value in words.items():
        block = block.replace(word, value)
    return block.split("\n\n")


async def test_postgres_passwords(installation, administrator, service_settings, worker_settings):
    urls = (service_settings.database_url, worker_settings.database_url)
    groups = {str(URL(url).user) for url in urls}
    create, drop = (
        [each.replace("calculation_requests_api", group) for group in groups]
        for each in on_the_page("sql", {"…": "made-up"})
    )
    for statement in create:
        await administrator.execute(statement.replace("_2", "_1"))
    installation.database_url = lambda url: with_login(url, f"{URL(url).user}_1", "made-up")
    async with installation.serving():
        for statement in create:
            await administrator.execute(statement)
        installation.database_url = lambda url: with_login(url, f"{URL(url).user}_2", "made-up")
        await installation.replace_pods()
        for statement in drop:
            await administrator.execute(statement)

    assert installation.statuses.keys() == {200}
    for group in groups:
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(with_login(urls[0], f"{group}_1", "made-up"))
        await administrator.execute(f"DROP ROLE {group}_2")


async def test_rabbitmq_password(installation, own_broker, amqp_url):
    words = {"PASSWORD": "made-up", "CONFIGURE": ".*", "WRITE": ".*", "READ": ".*"}
    create, drop = on_the_page("sh", words)
    await asyncio.to_thread(run_as_operator, create.replace("relay-2", "relay"), own_broker)
    installation.secret["AMQP_URL"] = with_login(amqp_url, "relay", "made-up")
    async with installation.serving():
        await asyncio.to_thread(run_as_operator, create, own_broker)
        installation.secret["AMQP_URL"] = with_login(amqp_url, "relay-2", "made-up")
        await installation.replace_pods()
        await asyncio.to_thread(run_as_operator, drop, own_broker)

    assert installation.statuses.keys() == {200}
    await asyncio.to_thread(run_as_operator, "rabbitmqctl delete_user relay-2", own_broker)


async def test_request_secret_keys(installation, service_settings, database):
    old, new = service_settings.request_secret_keys, f"new:{'C' * 43}"
    async with installation.serving():
        for keys in (f"{old},{new}", f"{new},{old}"):
            installation.secret["REQUEST_SECRET_KEYS"] = keys
            await installation.replace_pods()

    assert installation.statuses.keys() == {200}
    used = await database.fetch("SELECT DISTINCT secret_key_id FROM calculation_request")
    assert {row["secret_key_id"] for row in used} == {"current", "new"}
