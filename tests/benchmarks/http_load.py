"""Load on an HTTP API by wrk: a load generator in C, because it shares the processors with the API."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
from deploy.local.machine.folders import Report
from tests.benchmarks.comparison import PER_SECOND, Figures
from tests.benchmarks.stand import Stand

CONNECTIONS = 32
P50, P99 = "p50 ms", "p99 ms"

_SCRIPT = Path(__file__).with_name("load.lua")
_OVERTIME_SECONDS = 20.0


class _Summary(msgspec.Struct, frozen=True):
    requests: int
    seconds: float
    failed: int
    p50: float  # milliseconds, as is p99
    p99: float


def wrk(report: Report = print) -> list[str]:
    """Return the command that runs wrk, downloaded if it is missing. Raises LocalStackError."""
    return packages.command("wrk", package="wrk", report=report)


async def throughput(
    stand: Stand, base_url: str, paths: Sequence[str], *, body: bytes = b"", keyed: bool = False
) -> Figures:
    """Return how many requests a second are answered, over all connections."""
    figures = await load(stand, base_url, paths, body=body, keyed=keyed)
    return {PER_SECOND: figures[PER_SECOND]}


async def load(
    stand: Stand,
    base_url: str,
    paths: Sequence[str],
    *,
    body: bytes = b"",
    seconds: int | None = None,
    connections: int = CONNECTIONS,
    pause_milliseconds: int = 0,
    keyed: bool = False,
) -> Figures:
    """Send GETs of *paths*, or POSTs of *body*, over *connections* at once. A failed request is an error.

    Each connection waits *pause_milliseconds* after an answer. With *keyed*, each request has an
    Idempotency-Key of its own.
    """
    (stand.folder / "paths").write_text("".join(f"{path}\n" for path in paths))
    (stand.folder / "body").write_bytes(body)
    process = await asyncio.create_subprocess_exec(
        *(*wrk(), "--threads", "1", "--connections", str(connections)),
        *("--duration", f"{seconds or stand.sizes.seconds}s", "--timeout", "10s"),
        *("--script", str(_SCRIPT), base_url, "--"),
        *(str(stand.folder / "paths"), str(stand.folder / "body"), stand.token, str(pause_milliseconds)),
        *([uuid4().hex[:16]] if keyed else []),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **({"PACED": "yes"} if pause_milliseconds else {})},
    )
    async with asyncio.timeout((seconds or stand.sizes.seconds) + _OVERTIME_SECONDS):
        output, _ = await process.communicate()
    line = next((line for line in output.splitlines() if line.startswith(b"{")), None)
    if line is None:
        raise LocalStackError(f"wrk failed: {output.decode()}")
    summary = msgspec.json.decode(line, type=_Summary)
    if summary.failed:
        raise LocalStackError(f"{summary.failed} of {summary.requests} requests to {base_url} failed.")
    return {PER_SECOND: summary.requests / summary.seconds, P50: summary.p50, P99: summary.p99}
