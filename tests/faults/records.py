"""What is observed during a run, from outside the product, in seconds of one monotonic clock."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

import msgspec

LIVEZ = "GET /livez HTTP/1.1"


class Event:
    """The types of events that the product sends in a run."""

    CREATED, CALCULATED = "request.created", "request.calculated"
    EMAIL_SENT, EMAIL_FAILED = "request.email_sent", "request.email_failed"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run is, and what happens in it, as the command line says."""

    seconds: float = 0.0
    requests: int = 0
    times: int = 1  # for each fault, at least
    rate: float = 20.0
    seed: int = 0
    broken: str | None = None
    cluster: bool = False  # of three nodes of RabbitMQ, and a pair of Postgres
    faults: Sequence[str] = ()  # the names of those to inject
    longest_stall: float = 13.0  # in seconds, as are the next two
    recovery: float = 5.0
    drain: float = 120.0

    @property
    def email_claim_seconds(self) -> float:
        """Longer than Postgres is unreachable, plus the waits of a sender after that."""
        return self.longest_stall + 17.0


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


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A row of calculation_request at the end."""

    key: str
    uuid: str
    recipient: str
    calculation_id: str | None
    is_refused: bool = False  # the mail server permanently refuses its recipient


class Span(msgspec.Struct, frozen=True):
    """The time of one injection of a fault, or of what it did."""

    name: str  # of the fault, or of the process that it met
    began: float
    ended: float
    repeats_events: bool = False  # it may come between a confirm and its settling
    is_seen: bool = True  # something other than the injection showed its effect


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The API's answer to a create with an Idempotency-Key, which is also the external_id."""

    key: str
    status: int
    uuid: str | None
    is_replay: bool = False


_lists = partial(msgspec.field, default_factory=partial(defaultdict, list))


class Record(msgspec.Struct, kw_only=True):
    """Everything that was observed during one run."""

    plan: Plan = Plan()
    acknowledged: dict[str, float] = {}  # when, by key
    statuses: Counter[int] = msgspec.field(default_factory=Counter)  # of answers to creates without a key
    answers: list[Answer] = []  # to creates with a key
    stored: Sequence[Stored] = ()
    arrivals: list[Arrival] = []
    acceptances: list[Acceptance] = []
    spans: list[Span] = []
    kills: list[tuple[str, float]] = []  # the process that got a SIGKILL, and when
    freezes: list[Span] = []  # from a SIGSTOP to its SIGCONT
    refusals: list[Span] = []  # while a queue refused every event
    read_only: list[Span] = []  # while no process could write
    floods: list[Span] = []  # while one team sent too much
    calls: dict[str, list[bool]] = _lists()  # of others: answered or not
    peaks: dict[str, list[float]] = _lists()  # megabytes of memory, by process; and "mail connections"
    recoveries: list[tuple[Sequence[str], float]] = []  # the faults, and for how long latencies were high
    outbox_left: int = 0
    held: set[str] = set()  # request id and type of each
    poison_rows: set[str] = set()  # likewise, with the good events behind them
    dead_letters: set[str] = set()  # queue and message id of each
    poison_messages: set[str] = set()  # likewise
    secrets_stored: Sequence[str] = ()  # the requests of e-mails whose stored reply contains a secret
    exceptions: list[str] = []  # in logs, and deaths of processes that no fault had killed
    shortfalls: list[str] = []  # of the plan, for lack of time
    unnamed: list[str] = []  # outages that /readyz or doctor did not name
    seconds: float = 0.0
