"""A consumer of our events that trusts nobody: it knows each by its id, and checks that none is missing.

Written to be copied by the teams that consume our events, so it needs the standard library alone. It keeps
what it knows in memory; a real one keeps `seen` in its database, in the transaction that has the effect.

The `sequence` of an event counts the events of its request: 1, 2, … Delivery is at least once and in order
within a request, so what may be seen is 1, 2, 2, 3, and what may not is 1, 3 (a loss, until 2 comes) or 2, 1
(an inversion). A repeat, of whatever is older, is no fault: that is what the id is for. One exception: who
binds a queue when requests exist already sees them begin in the middle, until a replay.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["new", "repeat", "gap", "inversion", "conflict"]


@dataclass
class ReferenceConsumer:
    """Takes events in the order of their delivery, and keeps account of what is wrong."""

    seen: dict[str, dict[int, str]] = field(default_factory=dict)  # by request: sequence → event id
    counts: dict[Verdict, int] = field(
        default_factory=lambda: {"new": 0, "repeat": 0, "gap": 0, "inversion": 0, "conflict": 0}
    )

    def take(self, body: bytes) -> Verdict:
        """Take one message. Only after `new`, `gap` and `inversion` is there anything to do about it.

        `gap`: an earlier event of the request is missing. `inversion`: this is it, too late. `conflict`: two
        different events have the same place, which is a fault of the sender.
        """
        event: Mapping[str, Any] = json.loads(body)
        verdict = self._judge(event["data"]["uuid"], event["data"]["sequence"], event["id"])
        self.counts[verdict] += 1
        return verdict

    def _judge(self, uuid: str, sequence: int, event_id: str) -> Verdict:
        known = self.seen.setdefault(uuid, {})
        if sequence in known:
            return "repeat" if known[sequence] == event_id else "conflict"
        latest = max(known, default=0)
        known[sequence] = event_id
        if sequence < latest:
            return "inversion"
        return "new" if sequence == latest + 1 else "gap"

    def missing(self, written: Mapping[str, int] | None = None) -> dict[str, list[int]]:
        """Return what has not come, by request.

        Without *written* that is what is missing between events that came: the loss of the last one cannot be
        told from its not having happened. *written* says how many events each request has, as the sender
        knows.
        """
        latest = {uuid: max(known) for uuid, known in self.seen.items()}
        expected = {**latest, **(written or {})}
        gaps = {
            uuid: [sequence for sequence in range(1, count + 1) if sequence not in self.seen.get(uuid, {})]
            for uuid, count in expected.items()
        }
        return {uuid: sequences for uuid, sequences in gaps.items() if sequences}
