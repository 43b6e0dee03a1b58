"""Behind Debian's nginx and HAProxy, with the settings of the page: restarts, deaths, and slow callers."""

import asyncio
from collections import Counter
from functools import partial

import httpx
import pytest

from deploy.local.machine.ports import accepts
from service.postgres.pool import Connection
from tests.end_to_end.parties import another_request, client_of
from tests.harness.databases import count_waiting_statements
from tests.harness.gateways import HAProxy, Nginx
from tests.harness.processes import api_process, started
from tests.harness.raw_connection import connect_to, head_with
from tests.harness.waiting import eventually

_BUNDLE = b"GET /schema/rapidoc-min.js HTTP/1.1\r\nHost: api\r\n\r\n"
_SLOW_READERS = 60  # of the 64 connections that a client may have
_CALLERS, _CREATES_PER_SECOND, _ROUNDS = 20, 100, 2

pytestmark = pytest.mark.long


@pytest.fixture
def apis(service_settings, tmp_path):
    """Two APIs, not yet started, which end within five seconds."""
    return [api_process(service_settings, tmp_path, SHUTDOWN_SECONDS="5") for _ in range(2)]


@pytest.fixture(params=[Nginx, HAProxy])
async def gateway(request, apis, tmp_path):
    gateway: Nginx | HAProxy = request.param(apis, tmp_path)
    async with started(*apis), started(gateway, ready=False):
        await eventually(lambda: accepts(gateway.port))
        yield gateway


class Creates:
    """Creates, none of which the caller repeats, and what came of them."""

    def __init__(self) -> None:
        self.statuses: Counter[int | str] = Counter()
        self.answered: list[str] = []  # the external_id of each that was answered with 200

    async def create(self, client: httpx.AsyncClient, *, has_key: bool = False) -> None:
        """Send a create, and record what came of it."""
        body = another_request()
        headers = {"Idempotency-Key": body["external_id"]} if has_key else {}
        try:
            response = await client.post("/v1/request", json=body, headers=headers)
        except httpx.TransportError as error:
            self.statuses[repr(error)] += 1
            return
        self.statuses[response.status_code] += 1
        if response.is_success:
            self.answered.append(body["external_id"])

    async def are_stored_once(self, database: Connection) -> bool:
        """Whether each that was answered is stored exactly once."""
        rows = await database.fetch("SELECT external_id FROM calculation_request")
        times = Counter(row["external_id"] for row in rows)
        return all(times[external_id] == 1 for external_id in self.answered)


async def test_process_taken_out_before_sigterm_fails_no_create(apis, gateway, issuer, database):
    creates, is_over = Creates(), asyncio.Event()

    async def call() -> None:
        async with client_of(gateway, issuer.token()) as client:
            if gateway.closes_connections:
                client.headers["Connection"] = "close"
            while not is_over.is_set():
                await asyncio.gather(creates.create(client), asyncio.sleep(_CALLERS / _CREATES_PER_SECOND))

    async def answer_more() -> None:
        enough = len(creates.answered) + 50
        await eventually(lambda: len(creates.answered) >= enough)

    async with asyncio.TaskGroup() as callers:
        for _ in range(_CALLERS):
            callers.create_task(call())
        for api in apis * _ROUNDS:
            await answer_more()
            await gateway.take_out(api)
            assert await api.stop() == 0
            api.start()
            await api.becomes_ready()
            await gateway.put_in(api)
        await answer_more()
        is_over.set()

    assert creates.statuses.keys() == {200}
    assert await creates.are_stored_once(database)


async def test_process_that_dies_fails_only_creates_that_the_gateway_must_not_repeat(
    *, apis, gateway, issuer, database, other_connection
):
    creates, failed = Creates(), 2 if gateway.repeats_creates_with_key else 4
    dies, survives = apis

    async def are_waiting(number: int) -> bool:
        return await count_waiting_statements(database) == number

    await gateway.take_out(survives)
    async with (
        client_of(gateway, issuer.token()) as client,
        asyncio.TaskGroup() as calls,
        other_connection.transaction(),
    ):
        await other_connection.execute("LOCK TABLE calculation_request")
        for number in range(4):
            calls.create_task(creates.create(client, has_key=number % 2 == 0))
            await eventually(partial(are_waiting, number + 1))
        await gateway.put_in(survives)
        await dies.kill()
        await eventually(lambda: creates.statuses[502] == failed, seconds=8)

    assert creates.statuses == Counter({200: 4 - failed, 502: failed})
    assert await creates.are_stored_once(database)


@pytest.mark.parametrize("gateway", [Nginx], indirect=True)  # HAProxy does not read responses ahead
async def test_slow_callers_cost_the_api_nothing(apis, gateway, issuer):
    before = max(api.rss_megabytes() for api in apis)
    slow, half_sent = [
        [await connect_to(gateway.base_url) for _ in range(count)] for count in (_SLOW_READERS, 50)
    ]
    for connection in slow:
        connection.send(_BUNDLE * 5)
    for connection in half_sent:
        connection.send(head_with(issuer.token(), line="GET /v1/request HTTP/1.1")[:-2])
    async with client_of(gateway, issuer.token()) as caller:
        for _ in range(20):
            assert (await caller.post("/v1/request", json=another_request())).status_code == 200
    assert [await connection.rest() for connection in half_sent] == [b""] * 50

    assert max(api.rss_megabytes() for api in apis) < before + 60
    for connection in slow:
        connection.hang_up()
