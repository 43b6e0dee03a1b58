"""What is written down during a run, from outside the product: facts alone, no judgement.

Times are seconds of one monotonic clock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

CREATED = "request.created"
CALCULATED = "request.calculated"
EMAIL_SENT = "request.email_sent"
EMAIL_FAILED = "request.email_failed"


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """An event as the auditor got it."""

    event_id: str
    key: str  # the external_id of the request
    type: str
    sequence: int
    at: float
    redelivered: bool = False  # the broker's own repeat: the auditor lost its connection before its ack


class Acceptance(msgspec.Struct, gc=False):
    """An e-mail that the mail server took charge of."""

    message_id: str
    recipient: str
    process: str  # who handed it over
    connected_at: float  # when that process opened the connection
    at: float
    answered: bool = True  # False: the connection was broken before the sender can have read the answer


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A row of calculation_request at the end."""

    key: str
    uuid: str
    recipient: str
    calculation_id: str | None
    is_refused: bool = False  # the mail server refuses its recipient for good


class Span(msgspec.Struct, frozen=True):
    """A fault, from its beginning to its end."""

    fault: str
    began: float
    ended: float
    repeats_events: bool  # it may come between a confirm and its settling


class Kill(msgspec.Struct, frozen=True):
    """A SIGKILL to one of our processes."""

    process: str
    at: float


class Freeze(msgspec.Struct, frozen=True):
    """A SIGSTOP to one of our processes, until its SIGCONT."""

    process: str
    began: float
    ended: float


class Interval(msgspec.Struct, frozen=True):
    """From when until when something was so."""

    began: float
    ended: float


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What the API answered to a create with an Idempotency-Key, which is the external_id too."""

    key: str
    status: int
    uuid: str | None
    is_replay: bool = False


class Recovery(msgspec.Struct, frozen=True):
    """How long after the end of faults a newly stored request took less than the bar again."""

    faults: tuple[str, ...]
    seconds: float


class Held(msgspec.Struct, frozen=True):
    """A row of outbox_held at the end."""

    event: str  # request id and type
    parked: bool


class Record(msgspec.Struct, kw_only=True):
    """Everything that was written down about one run."""

    acknowledged: set[str] = msgspec.field(default_factory=set)
    unknown: set[str] = msgspec.field(default_factory=set)  # sent, but nobody knows whether stored
    statuses: Counter[int] = msgspec.field(default_factory=Counter)  # of answers to creates without a key
    answers: list[Answer] = msgspec.field(default_factory=list)  # to those with one
    stored: Sequence[Stored] = ()
    arrivals: list[Arrival] = msgspec.field(default_factory=list)
    acceptances: list[Acceptance] = msgspec.field(default_factory=list)
    spans: list[Span] = msgspec.field(default_factory=list)
    kills: list[Kill] = msgspec.field(default_factory=list)
    freezes: list[Freeze] = msgspec.field(default_factory=list)
    refusals: list[Interval] = msgspec.field(default_factory=list)  # a queue refused every event
    read_only: list[Interval] = msgspec.field(default_factory=list)  # no process of ours could write
    recoveries: list[Recovery] = msgspec.field(default_factory=list)
    outbox_left: int = 0
    held: Sequence[Held] = ()
    poison_rows: set[str] = msgspec.field(default_factory=set)  # request id and type of each
    poison_followers: set[str] = msgspec.field(default_factory=set)  # good events behind a poison row
    poison_messages: set[str] = msgspec.field(default_factory=set)  # queue and message id of each
    dead_letters: Sequence[str] = ()  # likewise
    log_lines: Sequence[str] = ()  # that tell of an unhandled exception
    deaths: list[str] = msgspec.field(default_factory=list)  # of processes that nobody had killed
    shortfalls: list[str] = msgspec.field(default_factory=list)  # of the plan: time ran out
    seconds: float = 0.0
    relays: int = 3
    email_claim_seconds: float = 30.0
    recovery_bar_seconds: float = 5.0
    latencies: Mapping[str, float] = msgspec.field(default_factory=dict)  # commit → auditor, quantiles
