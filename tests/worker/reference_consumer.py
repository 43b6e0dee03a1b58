"""A reference consumer of the service's events: deduplicates by id, and detects losses and inversions.

Teams that consume the events may copy it, so it needs only the standard library. It keeps its state in
memory; a real consumer keeps `seen` in its database, and writes it in the transaction that has the effect.

The `sequence` of an event counts the events of its request: 1, 2, … Delivery is at least once, and in order
within a request. So 1, 2, 2, 3 is correct, while 1, 3 (a loss, until 2 arrives) and 2, 1 (an inversion) are
faults. A repeat of an older event is no fault: its id identifies it. There are two exceptions. A queue that
is bound when requests exist already receives their events from the middle on, until a replay. And RabbitMQ
gives an event that another consumer did not acknowledge to the next consumer, marked as redelivered: 2, 1. If
the other consumer was on a node of RabbitMQ that failed, this takes up to two minutes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["new", "repeat", "gap", "late", "inversion", "conflict"]


@dataclass
class ReferenceConsumer:
    """Takes events in the order of delivery, and counts what is wrong with that order."""

    seen: dict[str, dict[int, str]] = field(default_factory=dict)  # by request: sequence → event id
    counts: dict[Verdict, int] = field(
        default_factory=lambda: {"new": 0, "repeat": 0, "gap": 0, "late": 0, "inversion": 0, "conflict": 0}
    )

    def take(self, body: bytes, *, redelivered: bool = False) -> Verdict:
        """Take one message. Process its event if the verdict is `new`, `gap`, `late` or `inversion`.

        `gap`: an earlier event of the request is missing. It is lost if it does not come in a few minutes.
        `late`: this is the missing event, which RabbitMQ had given to another consumer before. No fault.
        `inversion`: this is the missing event, in its first delivery. A fault of the sender.
        `conflict`: another event has the same sequence. A fault of the sender.
        """
        event: Mapping[str, Any] = json.loads(body)
        verdict = self._judge(event["data"]["uuid"], event["data"]["sequence"], event["id"])
        if verdict == "inversion" and redelivered:
            verdict = "late"
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
