"""What a run consists of, as the command line says."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from deploy.local.machine.folders import LOCAL as LOCAL_OF_CHECKOUT

LOCAL = LOCAL_OF_CHECKOUT / "faults"
TOKEN_SECONDS = 24 * 3600


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run is, and what happens in it."""

    seconds: float
    requests: int
    times: int  # for each fault, at least
    rate: float
    seed: int
    broken: str | None
    faults: Sequence[str]  # the names of those to inject; all if empty
    longest_stall_seconds: float
    recovery_bar_seconds: float
    drain_seconds: float

    @property
    def email_claim_seconds(self) -> float:
        """Longer than Postgres is unreachable, plus the waits of a sender after that."""
        return self.longest_stall_seconds + 17.0

    def shortfalls(self, done: Mapping[str, int], acknowledged: int) -> Iterator[str]:
        """Yield what the plan asks for and has not happened yet."""
        if acknowledged < self.requests:
            yield f"{acknowledged} requests were acknowledged, not {self.requests}"
        for fault, times in done.items():
            if times < self.times:
                yield f"{fault}: injected {times} times, not {self.times}"
