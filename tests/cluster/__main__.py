"""`python -m tests.cluster`: faults in a cluster under load. Exit status 1 if something was lost."""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

from deploy.local.machine.folders import CHECKOUT
from tests.cluster.kubernetes import PROCESSES, Cluster, KubectlFailed
from tests.cluster.verdict import Run
from tests.harness.waiting import until

_BETWEEN_SECONDS = 20.0  # of undisturbed load
_DRAIN_SECONDS = 180.0  # for the last events and e-mails

_FOLDER = CHECKOUT / ".local" / "cluster"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--namespace", default="calculation-requests-dev", help="with overlays/dev")
    parser.add_argument("--rate", type=float, default=20.0, help="creates a second")
    parser.add_argument("--upgrade-to", metavar="IMAGE", help="also upgrade to this image")
    arguments = parser.parse_args()
    _FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        run = asyncio.run(_run(Cluster(arguments.namespace, _FOLDER), arguments.rate, arguments.upgrade_to))
    except KubectlFailed as error:
        print(error, file=sys.stderr)
        return 2
    breaches = list(run.breaches())
    print(run.summary(), *breaches, "lost" if breaches else "nothing was lost", sep="\n")
    return 1 if breaches else 0


async def _run(cluster: Cluster, rate: float, image: str | None) -> Run:
    """Inject all faults under load, and return what came of the creates."""
    prefix = f"run{int(time.time())}"
    await cluster.start_callers(prefix, rate)
    try:
        for name, fault in _faults(cluster, image):
            await asyncio.sleep(_BETWEEN_SECONDS)
            print(name, flush=True)
            await fault()
        await asyncio.sleep(_BETWEEN_SECONDS)
    finally:
        creates = await cluster.stop_callers()
    stored = await cluster.stored(prefix)

    async def all_is_mailed() -> bool:
        return len({*await cluster.recipients(prefix)}) >= len(stored) and await cluster.undelivered() == 0

    await until(all_is_mailed, seconds=_DRAIN_SECONDS, pause_seconds=2.0)
    return Run(
        creates=creates,
        stored=stored,
        recipients=await cluster.recipients(prefix),
        queued=await cluster.queued(),
        undelivered=await cluster.undelivered(),
        kills=1,  # of the process that sends e-mails
    )


def _faults(cluster: Cluster, image: str | None) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """Return the faults in their order. Each ends once all processes are ready again."""
    faults: list[tuple[str, Callable[[], Awaitable[None]]]] = [("rolling restart", cluster.restart)]
    faults += [(f"{process} killed", partial(cluster.kill, process)) for process in PROCESSES]
    if image is not None:
        faults.append((f"upgrade to {image}", partial(cluster.upgrade, image)))
    return [*faults, ("rotation of passwords", cluster.rotate_passwords)]


if __name__ == "__main__":
    sys.exit(main())
