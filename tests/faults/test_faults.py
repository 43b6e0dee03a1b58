"""The harness itself: every invariant holds in a short run, and broken programs are found."""

import asyncio
import sys

import pytest

from deploy.local.machine.folders import CHECKOUT
from tests.harness.processes import bare_environment

pytestmark = pytest.mark.long


async def run_harness(*arguments: str, seconds: float) -> tuple[int | None, str]:
    """Run the harness to its end; return its exit status and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults", *arguments),
        cwd=CHECKOUT,
        env=bare_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()  # It ends its own processes.
            await asyncio.wait_for(process.wait(), 60)
    return process.returncode, output.decode()


# Recovery is not measured here, where other tests load the machine, but by `make faults`.
_SHORT = ("--times", "1", "--requests", "0", "--rate", "25", "--longest-stall", "4", "--recovery", "25")


async def test_nothing_is_lost_inverted_or_repeated_without_cause_when_every_fault_comes_once():
    status, output = await run_harness(*_SHORT, "--seconds", "90", seconds=500)

    assert status == 0, output
    assert "every invariant held" in output


@pytest.mark.parametrize(
    ("broken", "faults", "breach"),
    [
        ("settles-unconfirmed", ["messages returned"], "BREACH: nothing lost"),
        ("inverts", ["relay killed"], "BREACH: no inversions"),
        ("publishes-twice", ["mail server down"], "BREACH: repeats only in a fault's unconfirmed window"),
        ("loses-returned", ["messages returned"], "BREACH: nothing lost"),
        ("forgets-claims", ["mail server down"], "BREACH: e-mails sent once"),
        ("leaves-at-once", ["mail server slow during a SIGTERM"], "BREACH: e-mails sent once"),
        ("stores-replies", ["mail server quotes the link"], "BREACH: no secret stored"),
        ("keeps-sessions", ["sender refused"], "BREACH: mail connections bounded"),
        ("forgets-keys", ["APIs killed amid repeats"], "BREACH: one key is one request"),
    ],
)
async def test_a_broken_program_is_found(broken, faults, breach):
    status, output = await run_harness(
        *_SHORT, "--seconds", "12", "--drain", "15", "--broken", broken, "--faults", *faults, seconds=200
    )

    assert status == 1, output
    assert breach in output
