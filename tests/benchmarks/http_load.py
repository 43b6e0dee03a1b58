"""Load on an HTTP API by wrk: a load generator in C, because it shares the processors with the API."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
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


def wrk() -> list[str]:
    """Return the command that runs wrk, downloaded if it is missing. Raises LocalStackError."""
    return packages.command("wrk", package="wrk", report=print)


async def load(
    stand: Stand, base_url: str, paths: Sequence[str], *, body: bytes = b"", seconds: int | None = None
) -> Figures:
    """Send GETs of *paths*, or POSTs of *body*, over all connections; return how many a second are answered.

    A failed request is an error.
    """
    seconds = seconds or stand.sizes.seconds
    (stand.folder / "paths").write_text("".join(f"{path}\n" for path in paths))
    (stand.folder / "body").write_bytes(body)
    process = await asyncio.create_subprocess_exec(
        *(*wrk(), "--threads", "1", "--connections", str(CONNECTIONS)),
        *("--duration", f"{seconds}s", "--timeout", "10s"),
        *("--script", str(_SCRIPT), base_url, "--"),
        *(str(stand.folder / "paths"), str(stand.folder / "body"), stand.token),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(seconds + _OVERTIME_SECONDS):
        output, _ = await process.communicate()
    line = next((line for line in output.splitlines() if line.startswith(b"{")), None)
    if line is None:
        raise LocalStackError(f"wrk failed: {output.decode()}")
    summary = msgspec.json.decode(line, type=_Summary)
    if summary.failed:
        raise LocalStackError(f"{summary.failed} of {summary.requests} requests to {base_url} failed.")
    return {PER_SECOND: summary.requests / summary.seconds}
