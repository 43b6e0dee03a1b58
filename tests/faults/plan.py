"""What a run consists of, as the command line says."""

from collections.abc import Sequence

import msgspec

from deploy.local.machine.folders import LOCAL as LOCAL_OF_CHECKOUT

LOCAL = LOCAL_OF_CHECKOUT / "faults"
TOKEN_SECONDS = 100 * 24 * 3600  # longer than a fault sets a clock ahead


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run is, and what happens in it."""

    seconds: float
    requests: int
    times: int  # for each fault, at least
    rate: float
    seed: int
    broken: str | None
    cluster: bool  # of three nodes of RabbitMQ, and a pair of Postgres
    faults: Sequence[str]  # the names of those to inject; all if empty
    longest_stall: float  # in seconds, as are the next two
    recovery: float
    drain: float

    @property
    def email_claim_seconds(self) -> float:
        """Longer than Postgres is unreachable, plus the waits of a sender after that."""
        return self.longest_stall + 17.0
