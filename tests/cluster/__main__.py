"""`python -m tests.cluster`: faults in a cluster under load. Exit status 1 if the check failed."""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeAlias

from tests.cluster.kubernetes import PROCESSES, CheckFailed, Cluster
from tests.cluster.verdict import Run
from tests.harness.waiting import until

_BETWEEN_SECONDS = 20.0  # of undisturbed load
_DRAIN_SECONDS = 180.0  # for the last events and e-mails

Fault: TypeAlias = tuple[str, Callable[[], Awaitable[None]]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--namespace", default="calculation-requests-dev", help="with overlays/dev")
    parser.add_argument("--rate", type=float, default=20.0, help="creates a second")
    parser.add_argument("--upgrade-to", metavar="IMAGE", help="also upgrade to this image")
    arguments = parser.parse_args()
    cluster = Cluster(arguments.namespace)
    record = asyncio.run(run(cluster, _faults(cluster, arguments.upgrade_to), rate=arguments.rate))
    breaches = list(record.breaches())
    print(record.summary(), *breaches, "failed" if breaches else "nothing was lost", sep="\n")
    return 1 if breaches else 0


async def run(
    cluster: Cluster,
    faults: Iterable[Fault],
    *,
    rate: float,
    between_seconds: float = _BETWEEN_SECONDS,
    drain_seconds: float = _DRAIN_SECONDS,
) -> Run:
    """Inject the faults under load, and return what came of the creates. A step that fails ends no other."""
    record = Run()
    prefix = f"run{int(time.time())}"

    async def attempt(step: Awaitable[None]) -> bool:
        try:
            await step
        except CheckFailed as error:
            record.failed.append(str(error))
            return False
        return True

    try:
        if await attempt(cluster.start_callers(prefix, rate)):
            began = time.monotonic()
            for name, fault in faults:
                await asyncio.sleep(between_seconds)
                print(name, flush=True)
                if await attempt(fault()):
                    record.kills += name == "notifications killed"
            await asyncio.sleep(between_seconds)
            record.due = rate * (time.monotonic() - began)
            await attempt(cluster.stop_callers())
            await attempt(_take_stock(cluster, record, prefix, drain_seconds))
    finally:
        await attempt(cluster.delete_callers())
    return record


async def _take_stock(cluster: Cluster, record: Run, prefix: str, seconds: float) -> None:
    """Wait until all work is done, for at most *seconds*, and record what is there."""
    record.creates = await cluster.creates()

    async def is_done() -> bool:
        record.stored = await cluster.stored(prefix)
        record.recipients = await cluster.recipients(prefix)
        record.queued = await cluster.queued()
        record.undelivered = await cluster.undelivered()
        return not [*record.breaches()][len(record.failed) :]

    await until(is_done, seconds=seconds, pause_seconds=2.0)


def _faults(cluster: Cluster, image: str | None) -> list[Fault]:
    """Return the faults in their order. Each ends once all processes are ready again."""
    faults: list[Fault] = [("rolling restart", cluster.restart)]
    faults += [(f"{process} killed", partial(cluster.kill, process)) for process in PROCESSES]
    if image is not None:
        faults.append((f"upgrade to {image}", partial(cluster.upgrade, image)))
    return [*faults, ("rotation of passwords", cluster.rotate_passwords)]


if __name__ == "__main__":
    sys.exit(main())
