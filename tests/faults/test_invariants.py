"""Every invariant can be breached: records of runs with one thing wrong."""

from collections import Counter

import msgspec
import pytest

from tests.faults.verdict.invariants import check_all
from tests.faults.verdict.records import (
    CALCULATED,
    CREATED,
    EMAIL_SENT,
    Acceptance,
    Answer,
    Arrival,
    Freeze,
    Interval,
    Kill,
    Record,
    Recovery,
    Span,
    Stored,
)
from tests.faults.world.team import calculation_of

UUID = "req_1"
MESSAGE_ID = f"{UUID}.{CREATED}.1@service.example.com"
SENDER, OTHER_SENDER = "notifications-1", "notifications-2"
ONE_REQUEST = "one key is one request"
VANISHED = "Postgres clients vanished"


def arrival(type_: str, sequence: int, at: float, *, redelivered: bool = False) -> Arrival:
    return Arrival(f"{UUID}.{type_}.{sequence}", "case-1", type_, sequence, at, redelivered)


def acceptance(at: float, *, answered: bool = True, process: str = SENDER) -> Acceptance:
    return Acceptance(MESSAGE_ID, "ada@example.com", process, 89.9, at, answered)


ARRIVALS = [arrival(CREATED, 1, 100.0), arrival(CALCULATED, 2, 100.2), arrival(EMAIL_SENT, 3, 100.3)]
ANSWERS = [Answer("case-1", 200, UUID), Answer("case-1", 200, UUID, is_replay=True)]
HELD = {"req_2 poison", "req_2 request.calculated"}
POISON = "notifications poison-0"


@pytest.fixture
def record():
    """One request that has gone through the whole chain, a poison row and a poison message."""
    return Record(
        acknowledged={"case-1"},
        statuses=Counter({200: 1}),
        answers=list(ANSWERS),
        stored=[Stored("case-1", UUID, "ada@example.com", calculation_of(UUID))],
        arrivals=list(ARRIVALS),
        acceptances=[acceptance(100.1)],
        recoveries=[Recovery(("relay killed",), 0.4)],
        held=set(HELD),
        poison_rows={"req_2 poison"},
        poison_followers={"req_2 request.calculated"},
        poison_messages={POISON},
        dead_letters=[POISON],
    )


def breached(record: Record) -> set[str]:
    return {breach.invariant for breach in check_all(record)}


def test_a_run_in_which_all_is_well_breaches_nothing(record):
    assert breached(record) == set()


REPEATED = "repeats only in a fault's unconfirmed window"
LATER = Arrival("req_3.request.created.1", "case-3", CREATED, 1, 101.0)
UNCALCULATED = Stored("case-1", UUID, "ada@example.com", None)
# What is changed in the record, and the invariant that is breached by it, if any is.
CHANGES = {
    "acknowledged, not stored": ({"acknowledged": {"case-1", "case-2"}}, "nothing lost"),
    "of unknown outcome": ({"unknown": {"case-2"}}, None),
    "without its e-mail": ({"acceptances": []}, "nothing lost"),
    "without its calculation": ({"stored": [UNCALCULATED]}, "nothing lost"),
    "a later event first": (
        {"arrivals": [ARRIVALS[0], arrival(EMAIL_SENT, 3, 100.2), arrival(CALCULATED, 2, 100.3)]},
        "no inversions",
    ),
    "event of no stored request": ({"arrivals": [*ARRIVALS, LATER]}, "nothing lost"),
    "event repeated": ({"arrivals": [*ARRIVALS, arrival(CREATED, 1, 101.0)]}, REPEATED),
    "event redelivered": ({"arrivals": [*ARRIVALS, arrival(CREATED, 1, 101.0, redelivered=True)]}, None),
    "second e-mail": ({"acceptances": [acceptance(100.1), acceptance(104.0)]}, "e-mails sent once"),
    "e-mail after a lost answer": (
        {"acceptances": [acceptance(100.1, answered=False), acceptance(104.0)]},
        None,
    ),
    "another uuid for a key": (
        {"answers": [*ANSWERS, Answer("case-1", 200, "req_9", is_replay=True)]},
        ONE_REQUEST,
    ),
    "new twice": ({"answers": [*ANSWERS, Answer("case-1", 200, UUID)]}, ONE_REQUEST),
    "e-mail to somebody else": (
        {"acceptances": [msgspec.structs.replace(acceptance(100.1), recipient="mallory@example.com")]},
        "e-mails reach their recipient",
    ),
    "secret stored": ({"secrets_stored": ["req_1.request.created.1"]}, "no secret stored"),
    "connections left open": ({"mail_connections": 33}, "mail connections bounded"),
    "full outbox": ({"outbox_left": 1}, "outbox drained"),
    "poison gone": ({"held": set()}, "outbox drained"),
    "follower gone": ({"held": {"req_2 poison"}}, "outbox drained"),
    "another held": ({"held": {*HELD, "req_1 request.created"}}, "outbox drained"),
    "no dead letters": ({"dead_letters": []}, "dead letters are poison"),
    "another dead letter": ({"dead_letters": [POISON, "notifications req_1"]}, "dead letters are poison"),
    "slow recovery": ({"recoveries": [Recovery(("RabbitMQ killed",), 5.1)]}, "recovery in time"),
    "lanes kept": ({"recoveries": [Recovery((VANISHED, "email locked"), 5.1)]}, "recovery in time"),
    "lanes kept, silent broker": ({"recoveries": [Recovery((VANISHED, "AMQP connections cut"), 11.9)]}, None),
    "lanes kept too long": (
        {"recoveries": [Recovery((VANISHED, "AMQP connections cut"), 12.1)]},
        "recovery in time",
    ),
    "exception": ({"log_lines": ['relay-1: {"event": "message_failed"}']}, "no unhandled exceptions"),
    "death that nobody caused": ({"deaths": ["relay-1 exited with status 1."]}, "no unhandled exceptions"),
    "plan cut short": ({"shortfalls": ["relay killed: injected 19 times, not 20"]}, "plan fulfilled"),
    "other answers": ({"statuses": Counter({200: 1, 500: 1})}, "HTTP answers"),
}


@pytest.mark.parametrize(("change", "breach"), CHANGES.values(), ids=CHANGES)
def test_one_change_breaches_one_invariant_or_none(record, change, breach):
    assert breached(msgspec.structs.replace(record, **change)) == ({breach} if breach else set())


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_stored_request_without_one_of_its_events_is_lost(record, missing):
    del record.arrivals[missing]
    assert "nothing lost" in breached(record)


def test_an_earlier_event_that_is_repeated_is_no_inversion(record):
    record.spans = [Span("relay killed", 100.2, 100.3, repeats_events=True)]
    record.arrivals.append(arrival(CREATED, 1, 101.0))
    assert breached(record) == set()


@pytest.mark.parametrize(
    "span",
    [
        Span("mail server down", 100.2, 100.3, repeats_events=False),
        Span("relay killed", 90.0, 91.0, repeats_events=True),
        Span("relay killed", 102.0, 103.0, repeats_events=True),
    ],
    ids=["of another kind", "over before", "begun later"],
)
def test_a_fault_that_cannot_have_caused_it_does_not_excuse_a_repeat(record, span):
    record.spans = [span]
    record.arrivals.append(arrival(CREATED, 1, 101.0))
    assert breached(record) == {REPEATED}


@pytest.mark.parametrize(
    ("kill", "allowed"),
    [
        (Kill(SENDER, 100.15), True),
        (Kill(SENDER, 100.05), True),
        (Kill("notifications-2", 100.15), False),
        (Kill(SENDER, 89.0), False),
        (Kill(SENDER, 105.0), False),
    ],
)
def test_a_second_email_is_allowed_only_where_its_sender_was_killed_between(record, kill, *, allowed):
    record.kills = [kill]
    record.acceptances.append(acceptance(104.0))
    assert breached(record) == (set() if allowed else {"e-mails sent once"})


@pytest.mark.parametrize(
    ("first", "again", "allowed"),
    [
        ((SENDER, 100.1), (OTHER_SENDER, 131.0), True),
        ((SENDER, 100.1), (SENDER, 131.0), False),
        ((SENDER, 100.1), (OTHER_SENDER, 103.0), False),
        ((SENDER, 90.0), (OTHER_SENDER, 131.0), False),
        ((OTHER_SENDER, 131.0), (SENDER, 134.0), False),
    ],
    ids=["with the answer", "by itself", "claim not over", "long recorded", "before the content"],
)
def test_a_second_email_is_allowed_only_where_its_sender_was_frozen_with_the_answer(
    record, first, again, *, allowed
):
    record.freezes = [Freeze(SENDER, 100.2, 133.9)]
    record.acceptances = [acceptance(at, process=process) for process, at in (first, again)]
    assert breached(record) == (set() if allowed else {"e-mails sent once"})


@pytest.mark.parametrize(("copies", "allowed"), [(3 * 4, True), (3 * 4 + 1, False)])
def test_copies_beside_a_queue_that_refuses_are_bounded(record, copies, *, allowed):
    record.refusals = [Interval(99.0, 102.0)]
    record.spans = [Span("messages refused", 98.9, 102.1, repeats_events=True)]
    record.arrivals += [arrival(CREATED, 1, 101.0)] * copies
    assert breached(record) == (set() if allowed else {"copies bounded while a queue refuses"})


def test_copies_are_not_counted_while_another_fault_makes_some(record):
    record.refusals = [Interval(99.0, 102.0)]
    record.spans = [
        Span("messages refused", 98.9, 102.1, repeats_events=True),
        Span("relay killed", 101.0, 101.5, repeats_events=True),
    ]
    record.arrivals += [arrival(CREATED, 1, 101.0)] * 20
    assert breached(record) == set()


@pytest.mark.parametrize(("began", "allowed"), [(99.0, True), (97.5, False)])
def test_an_event_from_a_postgres_that_takes_no_writes_is_a_breach(record, began, *, allowed):
    record.read_only = [Interval(began, 105.0)]
    record.spans = [Span("Postgres read-only", began, 105.0, repeats_events=True)]
    del record.arrivals[1:]
    others = {"nothing lost"}  # The later events are deleted.
    assert breached(record) - others == (
        set() if allowed else {"nothing published while Postgres is read-only"}
    )


def test_a_second_row_for_the_same_key_is_a_breach(record):
    record.stored = [*record.stored, msgspec.structs.replace(record.stored[0], uuid="req_9")]
    assert ONE_REQUEST in breached(record)


def test_a_second_event_for_the_same_key_is_a_breach(record):
    record.arrivals.append(Arrival("req_9.request.created.1", "case-1", CREATED, 1, 101.0))
    assert ONE_REQUEST in breached(record)


def test_a_second_email_for_the_same_key_is_a_breach(record):
    record.acceptances.append(
        msgspec.structs.replace(acceptance(101.0), message_id="req_9.request.created.1@x")
    )
    assert ONE_REQUEST in breached(record)


@pytest.mark.parametrize(("status", "allowed"), [(409, True), (503, True), (422, False), (500, False)])
def test_a_create_with_a_key_may_also_be_in_flight(record, status, *, allowed):
    record.answers.append(Answer("case-1", status, None))
    assert breached(record) == (set() if allowed else {"HTTP answers"})
