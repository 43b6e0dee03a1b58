"""Callers that pipeline, send slowly or make up keys: the API keeps its memory and serves the others.

Callers that read slowly are the gateway's to bound.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from service.server.limits import LARGEST_BODY, MOST_CONNECTIONS, MOST_PROBE_CONNECTIONS
from tests.end_to_end.callers import client_of
from tests.harness.examples import A_REQUEST, STRUCTURE
from tests.harness.processes import Process, started
from tests.harness.raw_connection import connect_to, head_with

_LARGEST_MEGABYTES = 200.0
_ATTACK_SECONDS = 20.0
_USUAL_OPEN_FILES = 1024
_ROOT = b"GET / HTTP/1.1\r\nHost: api\r\n\r\n"
_TINY_HEADERS = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 15_000
CALLS: list[tuple[str, str, object]] = [("GET", STRUCTURE, None), ("POST", "/v1/request", A_REQUEST)]

Send = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def pipeline(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send as many requests as the server takes, and read all answers."""
    while True:
        writer.write(_ROOT * 5000)
        while writer.transport.get_write_buffer_size():
            await reader.read(100_000)


async def pipeline_unread(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send as many requests as the server takes, and read no answer."""
    while True:
        writer.write(_ROOT * 5000)
        await writer.drain()


def stall(data: bytes) -> Send:
    """Return a caller that sends the beginning of a request, and no more."""

    async def send(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await asyncio.sleep(_ATTACK_SECONDS)

    return send


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
    for method, path, body in CALLS:
        async with client_of(api, token) as client:
            assert (await client.request(method, path, json=body)).status_code == 200


async def test_probes_are_answered_at_once_while_callers_hold_every_connection_and_the_reverse(api, issuer):
    body = head_with(issuer.token(), f"Content-Length: {LARGEST_BODY}")

    async def answer_in_time() -> set[int]:
        async with httpx.AsyncClient(base_url=api.probes_url, timeout=1.0) as probes:
            return {(await probes.get(path)).status_code for path in ("/livez", "/readyz", "/metrics")}

    async with started(api):
        held = [await connect_to(api.base_url) for _ in range(MOST_CONNECTIONS + 100)]
        for each in held[::2]:
            each.send(body)
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
    headers = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 90
    slow = [(40, stall(body)), (40, stall(headers)), (40, stall(_TINY_HEADERS))]
    seconds, megabytes, closed = [], [], 0
    async with started(api), attacked(api, (50, pipeline), (50, pipeline_unread), *slow):
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
