"""Decides when the relay retries refused events.

An event waits for the earlier events of its request, and for nothing else. An event that RabbitMQ returns (no
queue is bound for it) or refuses (a nack) is retried without limit, because the fault may lie with any team's
queue and concern every event. So is an event that AMQP cannot carry, although this service writes none.
"""

import math
import time
from collections.abc import Sequence

from worker.relay.outbox_tables import Kind, OutboxRow
from worker.relay.publisher import PublishResult


class Retries:
    """Decides which refused events this process may retry now.

    Each attempt puts one more copy into every other queue that takes the event. So while refusals continue,
    only one refused event is retried every *pause_seconds* over all lanes, the longest wait first. The first
    confirmed retry lifts this limit and makes the other refused events due.

    Events that were not refused themselves are published at once: new events, and those that waited behind a
    refused one. Their confirms do not lift the limit, because a queue may refuse one event forever, such as a
    too large one, and take all others.

    The kinds of events take turns, and the limit of each is lifted separately. Otherwise another team's queue
    that refuses other types would delay e-mails.
    """

    def __init__(self, *, pause_seconds: float) -> None:
        self._limited = set[Kind]()  # from a refusal until a retry is confirmed
        self.recovering = set[Kind]()  # from then on, until all their refused events are due
        self._pause_seconds = pause_seconds
        self._last_tried = Kind.OTHER
        self._next_at = -math.inf

    def choose(self, due: Sequence[OutboxRow]) -> list[OutboxRow]:
        """Return the due events that may be published now."""
        limited = [row for row in due if row.attempts and row.kind in self._limited]
        if not limited:
            return list(due)
        chosen = [row for row in due if row not in limited]
        if time.monotonic() >= self._next_at:
            turn = min(limited, key=lambda row: row.kind is self._last_tried)  # a tie goes to the first
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
