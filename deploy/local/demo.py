"""`make demo`: one request through the whole chain, with the time of each step."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import httpx

from deploy.local import environment
from deploy.local.chain import follow_one_request
from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL, Claimed, Place, claimed
from deploy.local.machine.ports import free_port
from deploy.local.stack import running_stack
from deploy.local.terminal import Terminal


def main(terminal: Terminal) -> int:
    """Follow one request through the running stack, or through one started for it."""
    with _stack(terminal) as variables:
        terminal.report(f"One request through the whole chain at {variables['BASE_URL']}:\n")
        timeline = asyncio.run(follow_one_request(variables, terminal.stopping))
        terminal.report(timeline.render())
        for missing in timeline.missing:
            terminal.report(f"Missing: {missing}")
    return 1 if timeline.missing else 0


@contextmanager
def _stack(terminal: Terminal) -> Iterator[Mapping[str, str]]:
    running = environment.read(LOCAL / "env")
    if running and _answers(running):
        yield running
        return
    terminal.report("No stack is running, so this starts one, and stops it afterwards.")
    folder = LOCAL / "demo"
    place = Place(folder=folder, keep=False, report=terminal.report, stopping=terminal.stopping)
    ports = environment.Ports(api=free_port(), worker=free_port(), smtp=free_port())
    try:
        with claimed(LOCAL / "demo.lock"), running_stack(place, ports) as stack:
            terminal.report("")
            yield stack.variables
    except Claimed:
        raise LocalStackError(
            "`make demo` is already running in this checkout: wait until it ends."
        ) from None


def _answers(variables: Mapping[str, str]) -> bool:
    """Return whether API and worker are both ready."""
    with suppress(httpx.HTTPError):
        urls = (f"{variables['BASE_URL']}/readyz", f"{variables['WORKER_URL']}/readyz")
        return all(httpx.get(url, timeout=5.0, trust_env=False).is_success for url in urls)
    return False
