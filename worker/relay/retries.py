"""When the relay retries refused events.

An event waits for the earlier events of its request, and for nothing else. An event that RabbitMQ returns (no
queue is bound for it) or refuses (a nack) is retried for as long as it takes, because the fault may lie with
the queue of any team and concern every event. So is an event that AMQP cannot carry: our own writes make
none.
"""

import math
import time
from collections.abc import Sequence

from worker.relay.outbox import Kind, OutboxRow
from worker.relay.publisher import PublishResult


class Retries:
    """Which refused events this process may retry now.

    Each attempt puts one more copy into every other queue that takes the event. So while refusals go on, one
    refused event is retried every *pause_seconds*, over all lanes, longest wait first. The first retry that
    is confirmed lifts this limit and makes the other refused events due.

    Events that were not refused themselves are published at once: new ones, and those that waited behind a
    refused one. Their confirms do not lift the limit, because a queue may refuse one event for ever, as too
    large for it, and take all others.

    The kinds of events take turns, and the limit of each is lifted separately: a queue of another team that
    refuses other types must not delay e-mails.
    """

    def __init__(self, *, pause_seconds: float) -> None:
        self._limited = set[Kind]()  # from a refusal until a retry is confirmed
        self.recovering = set[Kind]()  # from then on, until all their refused events were made due
        self._pause_seconds = pause_seconds
        self._last_tried = Kind.OTHER
        self._next_at = -math.inf

    def choose(self, due: Sequence[OutboxRow]) -> list[OutboxRow]:
        """Return those of the due events that may be published now."""
        limited = [row for row in due if row.attempts and row.kind in self._limited]
        if not limited:
            return list(due)
        chosen = [row for row in due if row not in limited]
        if time.monotonic() >= self._next_at:
            turn = min(limited, key=lambda row: row.kind is self._last_tried)  # the first of equals
            self._last_tried = turn.kind
            self._next_at = time.monotonic() + self._pause_seconds
            chosen.append(turn)
        return chosen

    def end_recovery(self) -> None:
        """Record that all refused events of the recovering kinds were made due."""
        self.recovering.clear()

    def note(self, window: Sequence[OutboxRow], outcome: PublishResult) -> None:
        """Record the outcome of a window. A refusal by the broker outweighs the confirms of its kind."""
        sent = [row for row in window if row.id not in outcome.unencodable]
        refused = {row.kind for row in sent if row.id in outcome.failed}
        accepted = {row.kind for row in sent if row.attempts and row.id in outcome.confirmed} - refused
        self._limited = (self._limited - accepted) | refused
        self.recovering = (self.recovering | accepted) - refused
