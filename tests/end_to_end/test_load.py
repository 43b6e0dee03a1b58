"""Callers that pipeline, send slowly or are too many, also behind gateways; and restarts behind them."""

import asyncio
import statistics
import time
from collections import Counter
from contextlib import suppress
from functools import partial

import httpx
import pytest

from deploy.local.machine.ports import accepts
from service.server.limits import LARGEST_BODY, MOST_CONNECTIONS, MOST_PROBE_CONNECTIONS
from tests.end_to_end.parties import another_request, client_of
from tests.harness.databases import count_waiting_statements
from tests.harness.examples import A_REQUEST, STRUCTURE
from tests.harness.gateways import HAProxy, Nginx
from tests.harness.http import connect_to, head
from tests.harness.processes import Process, api_process, started
from tests.harness.waiting import eventually

_LARGEST_MEGABYTES = 200.0
_ATTACK_SECONDS = 20.0
_ROOT = b"GET / HTTP/1.1\r\nHost: api\r\n\r\n"

STATEMENT_SECONDS = 0.04  # So long that even a busy machine can send twice the load: see LARGEST_GROUP.
_CONNECTIONS = 2
_CAPACITY = _CONNECTIONS / STATEMENT_SECONDS  # requests a second, at best
_LOAD_SECONDS = 10.0
_LONGEST_WAIT_SECONDS = 2.5  # The service refuses after 0.5 s at most; the rest is for a busy machine.


async def pipeline(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, reads: bool) -> None:
    """Send as many requests as the server takes, and read all answers, or none."""
    while True:
        writer.write(_ROOT * 5000)
        while reads and writer.transport.get_write_buffer_size():
            await reader.read(100_000)
        await writer.drain()


async def stall(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, data: bytes) -> None:
    """Send the beginning of a request, and no more."""
    writer.write(data)
    await asyncio.sleep(_ATTACK_SECONDS)


async def keep_open(api: Process, send) -> None:
    """Keep a connection open: reconnect whenever the server closes it."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1000)
            try:
                await send(reader, writer)
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.1)


async def others_are_served(api: Process, token: str) -> None:
    """Check a read and a create, each over a new connection."""
    for method, path, body in (("GET", STRUCTURE, None), ("POST", "/v1/request", A_REQUEST)):
        async with client_of(api, token) as client:
            assert (await client.request(method, path, json=body)).status_code == 200


async def test_probes_are_answered_at_once_while_callers_hold_every_connection_and_the_reverse(api, issuer):
    async def answer_in_time() -> set[int]:
        async with httpx.AsyncClient(base_url=api.probes_url, timeout=1.0) as probes:
            return {(await probes.get(path)).status_code for path in ("/livez", "/readyz", "/metrics")}

    async with started(api):
        held = [await connect_to(api.base_url) for _ in range(MOST_CONNECTIONS + 100)]
        for each in held[::2]:
            each.send(head(issuer.token(), f"Content-Length: {LARGEST_BODY}"))
        statuses = await answer_in_time()
        held_probes = [await connect_to(api.probes_url) for _ in range(MOST_PROBE_CONNECTIONS + 100)]
        open_files = api.open_files()
        for each in held:
            each.hang_up()
        await others_are_served(api, issuer.token())
        for each in held_probes:
            each.hang_up()
        statuses |= await answer_in_time()

    assert statuses == {200}
    assert open_files < 1024, "the usual limit"


@pytest.mark.long
async def test_memory_is_bounded_under_callers_that_pipeline_and_slow_ones(api, issuer):
    token = issuer.token()
    body = head(token, f"Content-Length: {LARGEST_BODY}") + bytes(LARGEST_BODY - 1)
    begun = (body, *(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * count for count in (90, 15_000)))
    callers = [(40, partial(stall, data=data)) for data in begun]
    callers += [(50, partial(pipeline, reads=reads)) for reads in (True, False)]
    seconds, megabytes, closed = [], [], 0
    async with started(api):
        tasks = [asyncio.create_task(keep_open(api, send)) for count, send in callers for _ in range(count)]
        until = time.monotonic() + _ATTACK_SECONDS
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                await others_are_served(api, token)
            except httpx.ReadError:  # Seen once, while other programs saturated the machine.
                closed += 1
            seconds.append(time.monotonic() - began)
            megabytes.append(api.rss_megabytes())
            await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    print(f"at most {max(megabytes):.0f} MB, {max(seconds):.1f} s")  # noqa: T201 - shown on failure
    assert max(megabytes) < _LARGEST_MEGABYTES
    assert closed <= len(seconds) // 10


async def closed_loop(client: httpx.AsyncClient, seconds: float) -> float:
    """Return how many requests a second are served if there are as many callers as connections."""
    end = time.perf_counter() + seconds

    async def call_again_and_again() -> int:
        served = 0
        while time.perf_counter() < end:
            served += (await client.post("/v1/request", json=A_REQUEST)).is_success
        return served

    served = await asyncio.gather(*(call_again_and_again() for _ in range(_CONNECTIONS)))
    return sum(served) / (time.perf_counter() - end + seconds)


@pytest.mark.long
async def test_at_twice_the_load_it_can_bear_most_of_what_it_can_serve_is_served(
    service_settings, issuer, database, tmp_path
):
    await database.execute(
        f"""
        CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN PERFORM pg_sleep({STATEMENT_SECONDS}); RETURN new; END $$;
        CREATE TRIGGER slow BEFORE INSERT ON calculation_request
            FOR EACH ROW EXECUTE FUNCTION take_time()
        """
    )
    limits = {"DATABASE_TIMEOUT_SECONDS": "1", "DATABASE_POOL_SIZE": str(_CONNECTIONS)}
    api = api_process(service_settings, tmp_path, **limits)
    async with started(api), client_of(api, issuer.token()) as client:
        capacity = await closed_loop(client, 2.0)
        began, calls = time.perf_counter(), []
        async with asyncio.TaskGroup() as group:  # at this rate, even if earlier ones are not answered
            for number in range(round(2 * _CAPACITY * _LOAD_SECONDS)):
                await asyncio.sleep(max(0, began + number / (2 * _CAPACITY) - time.perf_counter()))
                calls.append(group.create_task(client.post("/v1/request", json=A_REQUEST)))
        answers = [call.result() for call in calls]
        after = [await closed_loop(client, 1.0) for _ in range(5)]  # Others use the machine, too.

    goodput = sum(answer.is_success for answer in answers) / _LOAD_SECONDS
    refused = [answer for answer in answers if not answer.is_success]
    print(f"{capacity=:.1f}/s {after=}/s {goodput=:.1f}/s")  # noqa: T201 - pytest shows it on failure
    assert {(answer.status_code, answer.headers["Retry-After"]) for answer in refused} == {(503, "1")}
    assert statistics.median(answer.elapsed.total_seconds() for answer in refused) < _LONGEST_WAIT_SECONDS
    assert goodput >= 0.6 * min(capacity, *after)
    assert max(after) >= 0.5 * capacity
    assert "Traceback" not in api.output
    stored = await database.fetchval("SELECT count(*) FROM calculation_request")
    assert stored >= goodput * _LOAD_SECONDS


_BUNDLE = b"GET /schema/rapidoc-min.js HTTP/1.1\r\nHost: api\r\n\r\n"
_SLOW_READERS = 60  # of the 64 connections that a client may have
_CALLERS, _CREATES_PER_SECOND, _ROUNDS = 20, 100, 2


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

    async def are_stored_once(self, database) -> bool:
        """Whether each that was answered is stored exactly once."""
        rows = await database.fetch("SELECT external_id FROM calculation_request")
        times = Counter(row["external_id"] for row in rows)
        return all(times[external_id] == 1 for external_id in self.answered)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("gateway", [Nginx], indirect=True)  # HAProxy does not read responses ahead
async def test_slow_callers_cost_the_api_nothing(apis, gateway, issuer):
    before = max(api.rss_megabytes() for api in apis)
    connections = [await connect_to(gateway.base_url) for _ in range(_SLOW_READERS + 50)]
    slow, half_sent = connections[:_SLOW_READERS], connections[_SLOW_READERS:]
    for connection in slow:
        connection.send(_BUNDLE * 5)
    for connection in half_sent:
        connection.send(head(issuer.token(), line="GET /v1/request HTTP/1.1")[:-2])
    async with client_of(gateway, issuer.token()) as caller:
        for _ in range(20):
            assert (await caller.post("/v1/request", json=another_request())).status_code == 200
    assert [await connection.rest() for connection in half_sent] == [b""] * 50

    assert max(api.rss_megabytes() for api in apis) < before + 60
    for connection in slow:
        connection.hang_up()
