"""When the relay retries refused events.

An event waits for the earlier events of its request, and for nothing else. An event that RabbitMQ returns (no
queue is bound for it) or refuses (a nack) is retried for as long as it takes. It is never parked, because the
fault may lie with the queue of any team and concern every event. An event that cannot be encoded is parked at
once, because it never can be. Otherwise only operators park events.
"""

import math
import time
from collections.abc import Sequence

from worker.relay.outbox import OutboxRow
from worker.relay.publisher import Outcome


class Retries:
    """Which refused events this process may retry now.

    Each attempt puts one more copy into every other queue that takes the event. So while refusals go on, one
    refused event is retried every *pause_seconds*, over all lanes, longest wait first. The first retry that
    is confirmed lifts this limit and makes the other refused events due.

    Events that were not refused themselves are published at once: new ones, and those that waited behind a
    refused one. Their confirms do not lift the limit, because a queue may refuse one event for ever, as too
    large for it, and take all others.

    request.created takes turns with the other types, and its limit is lifted separately: a queue of another
    team that refuses other types must not delay e-mails.
    """

    def __init__(self, *, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self._refused = set[bool]()  # is_created of the kinds without a confirmed retry since a refusal
        self._recovering = set[bool]()  # is_created of the kinds whose retry was confirmed
        self._last_tried = False
        self._next_at = -math.inf

    def choose(self, due: Sequence[OutboxRow]) -> list[OutboxRow]:
        """Return those of the due events that may be published now."""
        limited = [row for row in due if row.attempts and row.is_created in self._refused]
        if not limited:
            return list(due)
        chosen = [row for row in due if row not in limited]
        if time.monotonic() >= self._next_at:
            turn = min(limited, key=lambda row: row.is_created is self._last_tried)  # the first of equals
            self._last_tried = turn.is_created
            self._next_at = time.monotonic() + self._pause_seconds
            chosen.append(turn)
        return chosen

    def note(self, fresh: Sequence[OutboxRow], due: Sequence[OutboxRow], outcome: Outcome) -> None:
        """Record the outcome of a window. A refusal in it outweighs the confirms of its kind."""
        if not due and not outcome.refused:
            return
        refused = {row.is_created for row in (*fresh, *due) if row.id in outcome.refused}
        accepted = {row.is_created for row in due if row.attempts and row.id in outcome.confirmed} - refused
        self._refused = (self._refused - accepted) | refused
        self._recovering = (self._recovering | accepted) - refused

    @property
    def recovering(self) -> list[bool]:
        """The kinds (true for request.created) whose refused events are to be made due."""
        return list(self._recovering)

    def note_recovered(self) -> None:
        """Record that all refused events of these kinds are due."""
        self._recovering.clear()
