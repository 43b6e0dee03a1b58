"""What is observed during a run, from outside the product: facts without judgement.

Times are seconds of one monotonic clock.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

CREATED = "request.created"
CALCULATED = "request.calculated"
EMAIL_SENT = "request.email_sent"
EMAIL_FAILED = "request.email_failed"
LIVEZ = "GET /livez HTTP/1.1"


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """An event that reached the auditor."""

    event_id: str
    key: str  # the external_id of the request
    type: str
    sequence: int
    at: float
    redelivered: bool = False  # by the broker, because the auditor lost its connection before its ack


class Acceptance(msgspec.Struct, gc=False):
    """An e-mail that the mail server accepted."""

    message_id: str
    recipient: str
    process: str  # that sent it
    connected_at: float  # when the process opened the connection
    at: float
    answered: bool = True  # False: the connection broke before the sender can have read the reply


class Commit(msgspec.Struct, frozen=True, gc=False):
    """When a request was acknowledged."""

    at: float


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A row of calculation_request at the end."""

    key: str
    uuid: str
    recipient: str
    calculation_id: str | None
    is_refused: bool = False  # the mail server permanently refuses its recipient


class Span(msgspec.Struct, frozen=True):
    """One injection of a fault."""

    fault: str
    began: float
    ended: float
    repeats_events: bool  # it may come between a confirm and its settling
    is_seen: bool = True  # something other than the injection showed its effect


class Kill(msgspec.Struct, frozen=True):
    """A SIGKILL to one process."""

    process: str
    at: float


class Interval(msgspec.Struct, frozen=True):
    """A period of time, of one process if it is named."""

    began: float
    ended: float
    process: str = ""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The API's answer to a create with an Idempotency-Key, which is also the external_id."""

    key: str
    status: int
    uuid: str | None
    is_replay: bool = False


class Recovery(msgspec.Struct, frozen=True):
    """The time from the end of faults until new requests are published within the bar again."""

    faults: tuple[str, ...]
    seconds: float


class Record(msgspec.Struct, kw_only=True):
    """Everything that was observed during one run."""

    acknowledged: dict[str, Commit] = msgspec.field(default_factory=dict)  # by key
    unknown: set[str] = msgspec.field(default_factory=set)  # sent, with an unknown outcome
    statuses: Counter[int] = msgspec.field(default_factory=Counter)  # of answers to creates without a key
    answers: list[Answer] = msgspec.field(default_factory=list)  # to creates with a key
    stored: Sequence[Stored] = ()
    arrivals: list[Arrival] = msgspec.field(default_factory=list)
    acceptances: list[Acceptance] = msgspec.field(default_factory=list)
    spans: list[Span] = msgspec.field(default_factory=list)
    kills: list[Kill] = msgspec.field(default_factory=list)
    freezes: list[Interval] = msgspec.field(default_factory=list)  # from a SIGSTOP to its SIGCONT
    refusals: list[Interval] = msgspec.field(default_factory=list)  # while a queue refused every event
    read_only: list[Interval] = msgspec.field(default_factory=list)  # while no process could write
    floods: list[Interval] = msgspec.field(default_factory=list)  # while one team sent too much
    calls: dict[str, list[bool]] = msgspec.field(default_factory=dict)  # of others: answered or not
    peaks: dict[str, float] = msgspec.field(default_factory=dict)  # megabytes of memory, by process
    recoveries: list[Recovery] = msgspec.field(default_factory=list)
    outbox_left: int = 0
    held: set[str] = msgspec.field(default_factory=set)  # request id and type of each
    poison_rows: set[str] = msgspec.field(default_factory=set)  # request id and type of each
    poison_followers: set[str] = msgspec.field(default_factory=set)  # good events behind a poison row
    poison_messages: set[str] = msgspec.field(default_factory=set)  # queue and message id of each
    dead_letters: Sequence[str] = ()  # likewise
    secrets_stored: Sequence[str] = ()  # the requests of e-mails whose stored reply contains a secret
    mail_connections: int = 0  # that stayed open while the mail server refused the sender
    log_lines: Sequence[str] = ()  # that show an unhandled exception
    deaths: list[str] = msgspec.field(default_factory=list)  # of processes that no fault had killed
    shortfalls: list[str] = msgspec.field(default_factory=list)  # of the plan, for lack of time
    unnamed: list[str] = msgspec.field(default_factory=list)  # outages that /readyz or doctor did not name
    seconds: float = 0.0
    email_claim_seconds: float = 30.0
    recovery_bar_seconds: float = 5.0
