"""Load on an HTTP API by wrk: a load generator in C, because it shares the processors with the API."""

import re
from collections.abc import Sequence
from pathlib import Path

from deploy.local.errors import LocalStackError
from tests.benchmarks import subjects
from tests.benchmarks.comparison import PER_SECOND, Figures
from tests.benchmarks.stand import Stand
from tests.harness.processes import Process
from tests.harness.programs import command_of

CONNECTIONS = 32

_SCRIPT = Path(__file__).with_name("load.lua")


def wrk() -> list[str]:
    """Return the command that runs wrk, downloaded if it is missing. Raises LocalStackError."""
    return command_of("wrk", package="wrk")


async def create_on(stand: Stand, api: Process, *, seconds: int | None = None) -> Figures:
    return await load(stand, api, ["/v1/request"], body=subjects.JSON_BODY, seconds=seconds)


async def load(
    stand: Stand, api: Process, paths: Sequence[str], *, body: bytes = b"", seconds: int | None = None
) -> Figures:
    """Send GETs of *paths*, or POSTs of *body*, over all connections; return how many a second are answered.

    Also returns the processor time of one. A failed request is an error.
    """
    seconds = seconds or stand.seconds
    (stand.folder / "paths").write_text("".join(f"{path}\n" for path in paths))
    (stand.folder / "body").write_bytes(body)
    command = [
        *(*wrk(), "--threads", "1", "--connections", str(CONNECTIONS)),
        *("--duration", f"{seconds}s", "--timeout", "10s"),
        *("--script", str(_SCRIPT), api.base_url, "--"),
        *(str(stand.folder / "paths"), str(stand.folder / "body"), stand.token),
    ]
    meter = stand.meter(api)
    output = await stand.run("wrk", command, seconds=seconds + 20)
    sent = re.search(
        r"^ +([0-9]+) requests in .*^Requests/sec: +([0-9.]+)$", output, re.MULTILINE | re.DOTALL
    )
    if sent is None or "Non-2xx" in output or "Socket errors" in output:
        raise LocalStackError(f"Requests to {api.base_url} failed: {output}")
    return {PER_SECOND: float(sent[2]), **meter.figures(int(sent[1]))}
