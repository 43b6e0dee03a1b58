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


def arrival(type_: str, sequence: int, at: float, *, redelivered: bool = False) -> Arrival:
    return Arrival(f"{UUID}.{type_}.{sequence}", "case-1", type_, sequence, at, redelivered)


def acceptance(at: float, *, answered: bool = True, process: str = SENDER) -> Acceptance:
    return Acceptance(MESSAGE_ID, "ada@example.com", process, 89.9, at, answered)


@pytest.fixture
def record() -> Record:
    """One request that has gone through the whole chain, a poison row and a poison message."""
    return Record(
        acknowledged={"case-1"},
        statuses=Counter({200: 1}),
        answers=[Answer("case-1", 200, UUID), Answer("case-1", 200, UUID, is_replay=True)],
        stored=[Stored("case-1", UUID, "ada@example.com", calculation_of(UUID))],
        arrivals=[arrival(CREATED, 1, 100.0), arrival(CALCULATED, 2, 100.2), arrival(EMAIL_SENT, 3, 100.3)],
        acceptances=[acceptance(100.1)],
        recoveries=[Recovery(("relay killed",), 0.4)],
        held={"req_2 poison", "req_2 request.calculated"},
        poison_rows={"req_2 poison"},
        poison_followers={"req_2 request.calculated"},
        poison_messages={"notifications poison-0"},
        dead_letters=["notifications poison-0"],
    )


def breached(record: Record) -> set[str]:
    return {breach.invariant for breach in check_all(record)}


def test_a_run_in_which_all_is_well_breaches_nothing(record: Record) -> None:
    assert breached(record) == set()


def test_an_acknowledged_request_that_is_not_stored_is_lost(record: Record) -> None:
    record.acknowledged.add("case-2")
    assert breached(record) == {"nothing lost"}


def test_a_request_of_unknown_outcome_need_not_be_stored(record: Record) -> None:
    record.unknown.add("case-2")
    assert breached(record) == set()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_stored_request_without_one_of_its_events_is_lost(record: Record, missing: int) -> None:
    del record.arrivals[missing]
    assert "nothing lost" in breached(record)


def test_an_event_of_a_request_that_is_not_stored_is_a_breach(record: Record) -> None:
    record.arrivals.append(Arrival("req_3.request.created.1", "case-3", CREATED, 1, 101.0))
    assert breached(record) == {"nothing lost"}


def test_a_request_whose_email_the_mail_server_never_got_is_lost(record: Record) -> None:
    record.acceptances.clear()
    assert breached(record) == {"nothing lost"}


def test_a_request_without_its_calculation_is_lost(record: Record) -> None:
    record.stored = [msgspec.structs.replace(record.stored[0], calculation_id=None)]
    assert breached(record) == {"nothing lost"}


def test_a_later_event_that_comes_first_is_an_inversion(record: Record) -> None:
    record.arrivals[1:] = [arrival(EMAIL_SENT, 3, 100.2), arrival(CALCULATED, 2, 100.3)]
    assert breached(record) == {"no inversions"}


def test_an_earlier_event_that_is_repeated_is_no_inversion(record: Record) -> None:
    record.spans = [Span("relay killed", 100.2, 100.3, repeats_events=True)]
    record.arrivals.append(arrival(CREATED, 1, 101.0))
    assert breached(record) == set()


def test_an_event_repeated_without_a_fault_is_a_breach(record: Record) -> None:
    record.arrivals.append(arrival(CREATED, 1, 101.0))
    assert breached(record) == {"repeats only in a fault's unconfirmed window"}


@pytest.mark.parametrize(
    "span",
    [
        Span("mail server down", 100.2, 100.3, repeats_events=False),
        Span("relay killed", 90.0, 91.0, repeats_events=True),
        Span("relay killed", 102.0, 103.0, repeats_events=True),
    ],
    ids=["of another kind", "over before", "begun later"],
)
def test_a_fault_that_cannot_have_caused_it_does_not_excuse_a_repeat(record: Record, span: Span) -> None:
    record.spans = [span]
    record.arrivals.append(arrival(CREATED, 1, 101.0))
    assert breached(record) == {"repeats only in a fault's unconfirmed window"}


def test_what_the_broker_delivers_to_the_auditor_again_is_no_repeat(record: Record) -> None:
    record.arrivals.append(arrival(CREATED, 1, 101.0, redelivered=True))
    assert breached(record) == set()


def test_a_second_email_without_a_reason_is_a_breach(record: Record) -> None:
    record.acceptances.append(acceptance(104.0))
    assert breached(record) == {"e-mails sent once"}


def test_a_second_email_after_a_lost_answer_is_allowed(record: Record) -> None:
    record.acceptances = [acceptance(100.1, answered=False), acceptance(104.0)]
    assert breached(record) == set()


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
def test_a_second_email_is_allowed_only_where_its_sender_was_killed_between(
    record: Record, kill: Kill, *, allowed: bool
) -> None:
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
    record: Record, first: tuple[str, float], again: tuple[str, float], *, allowed: bool
) -> None:
    record.freezes = [Freeze(SENDER, 100.2, 133.9)]
    record.acceptances = [acceptance(at, process=process) for process, at in (first, again)]
    assert breached(record) == (set() if allowed else {"e-mails sent once"})


@pytest.mark.parametrize(("copies", "allowed"), [(3 * 4, True), (3 * 4 + 1, False)])
def test_copies_beside_a_queue_that_refuses_are_bounded(
    record: Record, copies: int, *, allowed: bool
) -> None:
    record.refusals = [Interval(99.0, 102.0)]
    record.spans = [Span("messages refused", 98.9, 102.1, repeats_events=True)]
    record.arrivals += [arrival(CREATED, 1, 101.0)] * copies
    assert breached(record) == (set() if allowed else {"copies bounded while a queue refuses"})


def test_copies_are_not_counted_while_another_fault_makes_some(record: Record) -> None:
    record.refusals = [Interval(99.0, 102.0)]
    record.spans = [
        Span("messages refused", 98.9, 102.1, repeats_events=True),
        Span("relay killed", 101.0, 101.5, repeats_events=True),
    ]
    record.arrivals += [arrival(CREATED, 1, 101.0)] * 20
    assert breached(record) == set()


@pytest.mark.parametrize(("began", "allowed"), [(99.0, True), (97.5, False)])
def test_an_event_from_a_postgres_that_takes_no_writes_is_a_breach(
    record: Record, began: float, *, allowed: bool
) -> None:
    record.read_only = [Interval(began, 105.0)]
    record.spans = [Span("Postgres read-only", began, 105.0, repeats_events=True)]
    del record.arrivals[1:]
    others = {"nothing lost"}  # The later events are deleted.
    assert breached(record) - others == (
        set() if allowed else {"nothing published while Postgres is read-only"}
    )


def test_repeats_of_a_key_that_get_the_same_request_breach_nothing(record: Record) -> None:
    assert [answer.is_replay for answer in record.answers] == [False, True]
    assert breached(record) == set()


def test_another_uuid_for_the_same_key_is_a_breach(record: Record) -> None:
    record.answers.append(Answer("case-1", 200, "req_9", is_replay=True))
    assert breached(record) == {ONE_REQUEST}


def test_a_second_row_for_the_same_key_is_a_breach(record: Record) -> None:
    record.stored = [*record.stored, msgspec.structs.replace(record.stored[0], uuid="req_9")]
    assert ONE_REQUEST in breached(record)


def test_a_second_event_for_the_same_key_is_a_breach(record: Record) -> None:
    record.arrivals.append(Arrival("req_9.request.created.1", "case-1", CREATED, 1, 101.0))
    assert ONE_REQUEST in breached(record)


def test_a_second_email_for_the_same_key_is_a_breach(record: Record) -> None:
    record.acceptances.append(
        msgspec.structs.replace(acceptance(101.0), message_id="req_9.request.created.1@x")
    )
    assert ONE_REQUEST in breached(record)


def test_two_answers_that_call_the_request_new_are_a_breach(record: Record) -> None:
    record.answers.append(Answer("case-1", 200, UUID))
    assert breached(record) == {ONE_REQUEST}


def test_an_email_to_somebody_else_is_a_breach(record: Record) -> None:
    record.acceptances[0].recipient = "mallory@example.com"
    assert breached(record) == {"e-mails reach their recipient"}


def test_a_full_outbox_is_a_breach(record: Record) -> None:
    record.outbox_left = 1
    assert breached(record) == {"outbox drained"}


@pytest.mark.parametrize(
    "held",
    [
        set(),
        {"req_2 poison"},
        {"req_2 poison", "req_2 request.calculated", "req_1 request.created"},
    ],
    ids=["poison gone", "follower gone", "another held"],
)
def test_anything_but_poison_among_the_held_is_a_breach(record: Record, held: set[str]) -> None:
    record.held = held
    assert breached(record) == {"outbox drained"}


@pytest.mark.parametrize("dead_letters", [[], ["notifications poison-0", "notifications req_1"]])
def test_dead_letters_other_than_the_poison_are_a_breach(record: Record, dead_letters: list[str]) -> None:
    record.dead_letters = dead_letters
    assert breached(record) == {"dead letters are poison"}


def test_a_slow_recovery_is_a_breach(record: Record) -> None:
    record.recoveries.append(Recovery(("RabbitMQ killed",), 5.1))
    assert breached(record) == {"recovery in time"}


def test_an_unhandled_exception_in_a_log_is_a_breach(record: Record) -> None:
    record.log_lines = ['relay-1: {"event": "message_failed"}']
    assert breached(record) == {"no unhandled exceptions"}


def test_a_death_that_nobody_caused_is_a_breach(record: Record) -> None:
    record.deaths.append("The relay-1 exited with status 1.")
    assert breached(record) == {"no unhandled exceptions"}


def test_a_plan_that_was_cut_short_is_a_breach(record: Record) -> None:
    record.shortfalls.append("relay killed: injected 19 times, not 20")
    assert breached(record) == {"plan fulfilled"}


def test_an_http_answer_other_than_200_and_503_is_a_breach(record: Record) -> None:
    record.statuses[500] += 1
    assert breached(record) == {"HTTP answers"}


@pytest.mark.parametrize(("status", "allowed"), [(409, True), (503, True), (422, False), (500, False)])
def test_a_create_with_a_key_may_also_be_in_flight(record: Record, status: int, *, allowed: bool) -> None:
    record.answers.append(Answer("case-1", status, None))
    assert breached(record) == (set() if allowed else {"HTTP answers"})
