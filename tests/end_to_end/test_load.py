"""Callers that pipeline, send slowly or are too many: the API keeps its memory, and serves what it can.

Callers that read slowly are the gateway's to bound.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import httpx
import pytest

from service.server.limits import LARGEST_BODY, MOST_CONNECTIONS, MOST_PROBE_CONNECTIONS
from tests.end_to_end.parties import client_of
from tests.harness.examples import A_REQUEST, STRUCTURE
from tests.harness.processes import Process, api_process, started
from tests.harness.raw_connection import connect_to, head_with

_LARGEST_MEGABYTES = 200.0
_ATTACK_SECONDS = 20.0
_USUAL_OPEN_FILES = 1024
_ROOT = b"GET / HTTP/1.1\r\nHost: api\r\n\r\n"
_HEADERS = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 90

STATEMENT_SECONDS = 0.04  # So long that even a busy machine can send twice the load: see LARGEST_GROUP.
_CONNECTIONS = 2
_CAPACITY = _CONNECTIONS / STATEMENT_SECONDS  # requests a second, at best
_LOAD_SECONDS = 10.0
_LONGEST_WAIT_SECONDS = 2.5  # The service refuses after 0.5 s at most; the rest is for a busy machine.

Send = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


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


@asynccontextmanager
async def attacked(api: Process, *callers: tuple[int, Send]) -> AsyncIterator[None]:
    """Keep as many connections of each kind open, reconnecting those that the server closes."""

    async def keep_open(send: Send) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1000)
                try:
                    await send(reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(keep_open(send)) for count, send in callers for _ in range(count)]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
            each.send(head_with(issuer.token(), f"Content-Length: {LARGEST_BODY}"))
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
    assert open_files < _USUAL_OPEN_FILES


@pytest.mark.long
async def test_memory_is_bounded_under_callers_that_pipeline_and_slow_ones(api, issuer):
    token = issuer.token()
    body = head_with(token, f"Content-Length: {LARGEST_BODY}") + bytes(LARGEST_BODY - 1)
    begun = (body, _HEADERS, b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 15_000)
    slow = [(40, partial(stall, data=data)) for data in begun]
    seconds, megabytes, closed = [], [], 0
    quick = [(50, partial(pipeline, reads=reads)) for reads in (True, False)]
    async with started(api), attacked(api, *quick, *slow):
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


async def open_loop(client: httpx.AsyncClient, rate: float) -> list[httpx.Response]:
    """Send *rate* requests a second, even if earlier ones are not answered."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        calls = []
        for number in range(round(rate * _LOAD_SECONDS)):
            await asyncio.sleep(max(0, began + number / rate - time.perf_counter()))
            calls.append(group.create_task(client.post("/v1/request", json=A_REQUEST)))
    return [sent.result() for sent in calls]


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
        answers = await open_loop(client, 2 * _CAPACITY)
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
