"""The harness itself: every invariant holds in a short run, and broken programs are found."""

import pytest

from tests.harness.processes import Ended, bare_environment, run_process
from tests.harness.rabbitmq_cluster import skip_without_programs

pytestmark = pytest.mark.long


# Recovery is not measured here, where other tests load the machine, but by `make faults`.
_SHORT = ("--times", "1", "--requests", "0", "--rate", "25", "--longest-stall", "4", "--recovery", "25")
# On a busy machine the recovery after *leader cut off* once took more than a minute.
_CLUSTER = ("--cluster", "--rate", "8", "--recovery", "120")


async def run(*options: str, seconds: float) -> Ended:
    return await run_process("tests.faults", *options, environment=bare_environment(), seconds=seconds)


async def test_nothing_is_lost_inverted_or_repeated_without_cause_when_every_fault_comes_once():
    ended = await run(*_SHORT, "--seconds", "100", seconds=500)

    assert ended.status == 0, ended.output + ended.errors
    assert "every invariant held" in ended.output


async def test_nothing_is_lost_inverted_or_repeated_without_cause_when_a_node_of_a_cluster_fails():
    skip_without_programs()
    ended = await run(*_CLUSTER, seconds=600)

    assert ended.status == 0, ended.output + ended.errors
    assert "every invariant held" in ended.output


async def test_broken_program_is_found_in_a_cluster():
    skip_without_programs()
    broken = ("--broken", "settles-unconfirmed", "--drain", "10", "--faults", "leader killed")
    ended = await run(*_CLUSTER, *broken, seconds=400)

    assert ended.status == 1, ended.output + ended.errors
    assert "BREACH: nothing lost" in ended.output


@pytest.mark.parametrize(
    ("broken", "faults", "breach"),
    [
        ("settles-unconfirmed", ["messages returned"], "BREACH: nothing lost"),
        ("inverts", ["relay killed"], "BREACH: no inversions"),
        ("publishes-twice", ["mail server down"], "BREACH: repeats only near a fault"),
        ("forgets-claims", ["mail server down"], "BREACH: emails sent once"),
        ("leaves-at-once", ["mail server slow during a SIGTERM"], "BREACH: emails sent once"),
        ("stores-replies", ["mail server quotes the link"], "BREACH: no secret stored"),
        ("keeps-sessions", ["sender refused"], "BREACH: resources bounded"),
        ("keeps-bodies", ["deep messages"], "BREACH: resources bounded"),
        ("trusts-clocks", ["clock of relay ahead"], "BREACH: nothing lost"),
        ("trusts-clocks", ["clock of api behind"], "BREACH: nothing lost"),
        ("trusts-clocks", ["clock of notifications ahead"], "BREACH: nothing lost"),
        ("forgets-keys", ["APIs killed amid repeats"], "BREACH: one key is one request"),
    ],
)
async def test_a_broken_program_is_found(broken, faults, breach):
    options = (*_SHORT, "--seconds", "12", "--drain", "15", "--broken", broken, "--faults", *faults)
    ended = await run(*options, seconds=400)

    assert ended.status == 1, ended.output + ended.errors
    assert breach in ended.output
