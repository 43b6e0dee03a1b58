"""`python -m tests.cluster`: faults in a cluster under load. Exit status 1 if the check failed."""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from tests.cluster.kubernetes import PROCESSES, CheckFailed, Cluster, Create
from tests.harness.waiting import until

_EMAILS_IN_FLIGHT = 16  # of a process with the default EMAIL_CONCURRENCY
_LEAST = 0.8  # the share of the creates that the rate makes due

Faults = dict[str, Callable[[], Awaitable[None]]]


class Run(msgspec.Struct, kw_only=True):
    """The record of a run: every create is stored once, and gets its calculation and one e-mail."""

    due: float = 1.0  # creates, by the rate and the time from the first to the end
    creates: Sequence[Create] = ()
    stored: Mapping[str, tuple[str, str | None]] = {}  # uuid and calculation_id by Idempotency-Key
    recipients: Sequence[str] = ()  # of every e-mail
    queued: Mapping[str, int] = {}  # the messages in each queue at the end, and the events in the outbox
    kills: int = 0  # how often a process was killed, which may repeat the e-mails that it had in flight
    failed: list[str] = []  # steps of the check, with the reason

    def breaches(self) -> Iterator[str]:
        """Yield what must not happen."""
        yield from self.failed
        if len(self.creates) < self.due * _LEAST:
            yield f"{len(self.creates)} creates, but {self.due:.0f} were due"
        for create in self.creates:
            uuid, calculation_id = self.stored.get(create.key, (None, None))
            if create.uuid is None:
                yield f"{create.key} never got 200: {create.failures}"
            elif create.uuid != uuid:
                yield f"{create.key} got {create.uuid}, but {uuid} is stored"
            elif calculation_id != f"calculation-of-{uuid}":
                yield f"{create.key} has the calculation {calculation_id}"
        emails = Counter(self.recipients)
        for recipient in sorted({f"{key}@example.com" for key in self.stored} ^ emails.keys()):
            yield f"{recipient}: {emails[recipient]} e-mails"
        if self.repeats > self.kills * _EMAILS_IN_FLIGHT:
            yield f"{self.repeats} e-mails were repeated, after {self.kills} kills"
        yield from (f"{queue} has {messages} messages" for queue, messages in self.queued.items() if messages)

    @property
    def repeats(self) -> int:
        return len(self.recipients) - len({*self.recipients})

    def summary(self) -> str:
        failures = Counter(failure for create in self.creates for failure in create.failures)
        tries = ", ".join(f"{count} {name}" for name, count in failures.items()) or "none"
        return f"{len(self.creates)} creates, {self.repeats} e-mails repeated; tries that failed: {tries}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--namespace", default="calculation-requests-dev", help="with overlays/dev")
    parser.add_argument("--rate", type=float, default=20.0, help="creates a second")
    parser.add_argument("--upgrade-to", metavar="IMAGE", help="also upgrade to this image")
    arguments = parser.parse_args()
    cluster = Cluster(arguments.namespace)
    # In their order. Each ends once all processes are ready again.
    faults: Faults = {
        "rolling restart": cluster.restart,
        **{f"{process} killed": partial(cluster.kill, process) for process in PROCESSES},
        "rotation of passwords": cluster.rotate_passwords,
    }
    if arguments.upgrade_to is not None:
        faults["upgrade"] = partial(cluster.upgrade, arguments.upgrade_to)
    record = asyncio.run(run(cluster, faults, rate=arguments.rate))
    breaches = list(record.breaches())
    print(record.summary(), *breaches, "failed" if breaches else "nothing was lost", sep="\n")
    return 1 if breaches else 0


async def run(
    cluster: Cluster,
    faults: Faults,
    *,
    rate: float,
    between_seconds: float = 20.0,  # of undisturbed load
    drain_seconds: float = 180.0,  # for the last events and e-mails
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
            for name, fault in faults.items():
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
        return not [*record.breaches()][len(record.failed) :]

    await until(is_done, seconds=seconds, pause_seconds=2.0)


if __name__ == "__main__":
    sys.exit(main())
