"""Decides when the relay retries refused events, which loop.py has moved to outbox_held.

An event waits for the earlier events of its request, and for nothing else. RabbitMQ refuses an event by
returning it, if no queue is bound for it, or with a nack. Refused events, and events that AMQP cannot carry,
are retried without limit, because the fault may lie with any team's queue and concern every event.
"""

import math
import time
from collections.abc import Sequence

from worker.relay.outbox_tables import Kind, OutboxRow
from worker.relay.publisher import PublishResult


class Retries:
    """Decides which refused events this process may retry now.

    Each retry adds a copy of the event to every queue that does take it. So while refusals continue, only
    one refused event is retried every *pause_seconds*, over all lanes. The event that has waited longest goes
    first. The first confirmed retry lifts this limit and makes the other refused events due.

    Events that were not refused are published at once: new events, and events that waited behind a refused
    event. Their confirms do not lift the limit, because a queue may take all other events and still refuse
    this event forever, for example a very large event.

    The two kinds of events, `request.created` and all other types, take turns. The limit is lifted for each
    kind separately. Otherwise a team's queue that refuses another type would delay e-mails.
    """

    def __init__(self, *, pause_seconds: float) -> None:
        self._limited = set[Kind]()  # from a refusal until a retry is confirmed
        self.recovering = set[Kind]()  # from a confirmed retry until all refused events are due
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
            turn = min(limited, key=lambda row: row.kind is self._last_tried)  # the other kind first
            self._last_tried = turn.kind
            self._next_at = time.monotonic() + self._pause_seconds
            chosen.append(turn)
        return chosen

    def end_recovery(self) -> None:
        """Record that all refused events of the recovering kinds were made due."""
        self.recovering.clear()

    def note(self, window: Sequence[OutboxRow], outcome: PublishResult) -> None:
        """Record the outcome of a window. A kind with a refusal is limited, whatever was confirmed."""
        sent = [row for row in window if row.id not in outcome.unencodable]
        refused = {row.kind for row in sent if row.id in outcome.failed}
        accepted = {row.kind for row in sent if row.attempts and row.id in outcome.confirmed} - refused
        self._limited = (self._limited - accepted) | refused
        self.recovering = (self.recovering | accepted) - refused
