"""What blocks an event, when a refused one is tried again, and what parks it.

An event waits for the earlier ones of its request, and for nothing else. One that RabbitMQ returns (no queue
is bound for it) or refuses (a nack) is tried again for as long as it takes: the fault may be any team's queue
and concern every event, so it is never parked. One that cannot be encoded never will be: it is parked at
once. Nothing else parks events but an operator.
"""

import math
import time
from collections.abc import Sequence

from worker.relay.outbox import OutboxRow
from worker.relay.publisher import Outcome


class Retries:
    """Which refused events this process may try again now.

    Each attempt is one more copy in every other queue that takes the event. So while refusals go on, one
    refused event is tried in *pause_seconds* over all lanes, the one that has waited longest first; the first
    that is confirmed lifts that, and ends the wait of the others. Events that were not refused themselves,
    new ones and those that waited behind a refused one, are published at once all the same. Their confirms
    lift nothing: a queue may refuse one event for ever, too large for it, and take all others.

    request.created takes turns with the others, and is lifted by itself: a queue of another team that refuses
    their kind must not delay e-mails.
    """

    def __init__(self, *, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self._refused = set[bool]()  # is_created of those of which none held was confirmed since a refusal
        self._recovering = set[bool]()  # is_created of those of which one was confirmed at last
        self._last_tried = False
        self._next_at = -math.inf

    def choose(self, held: Sequence[OutboxRow]) -> list[OutboxRow]:
        """Leave out those whose turn has not come."""
        paced = [row for row in held if row.attempts and row.is_created in self._refused]
        if not paced:
            return list(held)
        chosen = [row for row in held if row not in paced]
        if time.monotonic() >= self._next_at:
            turn = min(paced, key=lambda row: row.is_created is self._last_tried)  # the first of equals
            self._last_tried = turn.is_created
            self._next_at = time.monotonic() + self._pause_seconds
            chosen.append(turn)
        return chosen

    def note(self, fresh: Sequence[OutboxRow], held: Sequence[OutboxRow], outcome: Outcome) -> None:
        """Take note of what became of a window; where anything was refused, no confirm counts."""
        if not held and not outcome.refused:
            return
        refused = {row.is_created for row in (*fresh, *held) if row.id in outcome.refused}
        taken = {row.is_created for row in held if row.attempts and row.id in outcome.confirmed} - refused
        self._refused = (self._refused - taken) | refused
        self._recovering = (self._recovering | taken) - refused

    @property
    def recovering(self) -> list[bool]:
        """Of which kinds (request.created or others) the wait of refused events is to end."""
        return list(self._recovering)

    def note_recovered(self) -> None:
        """Take note that none of them waits any more."""
        self._recovering.clear()
