"""Every invariant can be breached: records of runs with one thing wrong."""

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog

from service.settings import Settings
from service.telemetry import logs
from tests.faults.__main__ import shortfalls_of
from tests.faults.invariants import check_all
from tests.faults.others import calculation_of
from tests.faults.records import (
    CALCULATED,
    CREATED,
    EMAIL_SENT,
    LIVEZ,
    MAIL_CONNECTIONS,
    Acceptance,
    Answer,
    Arrival,
    Record,
    Span,
    Stored,
)
from tests.faults.stocktaking import is_suspicious
from tests.faults.world import Fault
from tests.harness.command_line import restored_logging

UUID, RECIPIENT = "req_1", "ada@example.com"
SENDER, OTHER_SENDER = "notifications-1", "notifications-2"


def arrival(type_: str, sequence: int, at: float, *, redelivered: bool = False) -> Arrival:
    return Arrival(f"{UUID}.{type_}.{sequence}", "case-1", type_, sequence, at, redelivered)


def acceptance(at: float, **facts: Any) -> Acceptance:
    usual = Acceptance(f"{UUID}.invitation.1@service.example.com", RECIPIENT, SENDER, 89.9, at)
    return msgspec.structs.replace(usual, **facts)


def stored(uuid: str) -> Stored:
    return Stored("case-1", uuid, RECIPIENT, calculation_of(uuid))


ARRIVALS = [arrival(CREATED, 1, 100.0), arrival(CALCULATED, 2, 100.2), arrival(EMAIL_SENT, 3, 100.3)]
ANSWERS = [Answer("case-1", 200, UUID), Answer("case-1", 200, UUID, is_replay=True)]
POISON = {"poison-0", "poison-1"}
# One request that has gone through the whole chain, two poison rows and two poison messages.
RECORD = Record(
    acknowledged={"case-1": 99.9},
    statuses=Counter({200: 1}),
    answers=ANSWERS,
    stored=[stored(UUID)],
    arrivals=ARRIVALS,
    acceptances=[acceptance(100.1)],
    recoveries=[(["relay killed"], 0.4)],
    held=POISON,
    poison_rows=POISON,
    dead_letters=POISON,
    poison_messages=POISON,
)

LOST, INVERTED = "nothing lost", "no inversions"
REPEATED = "repeats only near a fault"
ONE_REQUEST, DOCUMENTED = "one key is one request", "answers as documented"
SERVED = "others served"
SENT_ONCE = "emails sent once"
RECIPIENTS = "emails reach their recipient"
BOUNDED = "resources bounded"
RELAY_KILLED = Span("relay killed", 101.0, 101.5, repeats_events=True)


def span(fault: str, began: float, ended: float, *, repeats_events: bool = True) -> dict[str, Any]:
    """Return a fault, and an event that came again after it."""
    spans = [Span(fault, began, ended, repeats_events)]
    return {"spans": spans, "arrivals": [*ARRIVALS, arrival(CREATED, 1, 101.0)]}


def killed(process: str, at: float) -> dict[str, Any]:
    """Return an e-mail that its sender sent twice, and a SIGKILL."""
    return {"kills": [(process, at)], "acceptances": [acceptance(100.1), acceptance(104.0)]}


def frozen(first: tuple[str, float], again: tuple[str, float]) -> dict[str, Any]:
    """Return an e-mail that was sent twice, and a SIGSTOP to its usual sender."""
    acceptances = [acceptance(at, process=process) for process, at in (first, again)]
    return {"freezes": [Span(SENDER, 100.2, 133.9)], "acceptances": acceptances}


def refused(copies: int, *others: Span) -> dict[str, Any]:
    """Return a queue that refused for three seconds, and copies of an event meanwhile."""
    spans = [Span("messages refused", 98.9, 102.1, repeats_events=True), *others]
    arrivals = [*ARRIVALS, *[arrival(CREATED, 1, 101.0)] * copies]
    return {"refusals": [Span("", 99.0, 102.0)], "spans": spans, "arrivals": arrivals}


def flooded(*others: Span, calculated: float = 104.9) -> dict[str, Any]:
    """Return a flood of two seconds, in which a request was created and then calculated."""
    arrivals = [ARRIVALS[0], arrival(CALCULATED, 2, calculated), arrival(EMAIL_SENT, 3, 106.0)]
    spans = [Span("deep messages", 99.0, 101.0), *others]
    return {"floods": [Span("", 99.0, 101.0)], "spans": spans, "arrivals": arrivals}


def read_only(began: float) -> dict[str, Any]:
    """Return events that were published while Postgres had taken no writes since *began*."""
    spans = [Span("Postgres read-only", began, 105.0, repeats_events=True)]
    return {"read_only": [Span("", began, 105.0)], "spans": spans}


# What is changed in the record, and the invariants that are breached by it.
CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "none": ({}, set()),
    "acknowledged, not stored": ({"acknowledged": {"case-1": 99.9, "case-2": 99.9}}, {LOST}),
    "without its last event": ({"arrivals": ARRIVALS[:-1]}, {LOST}),
    "without its e-mail": ({"acceptances": []}, {LOST}),
    "without its calculation": ({"stored": [Stored("case-1", UUID, RECIPIENT, None)]}, {LOST}),
    "a later event first": (
        {"arrivals": [ARRIVALS[0], arrival(EMAIL_SENT, 3, 100.2), arrival(CALCULATED, 2, 100.3)]},
        {INVERTED},
    ),
    "an earlier event redelivered": (
        {"arrivals": [ARRIVALS[0], ARRIVALS[2], arrival(CALCULATED, 2, 100.4, redelivered=True)]},
        set(),
    ),
    "event of no stored request": (
        {"arrivals": [*ARRIVALS, Arrival("req_3.request.created.1", "case-3", CREATED, 1, 101.0)]},
        {LOST},
    ),
    "event repeated": ({"arrivals": [*ARRIVALS, arrival(CREATED, 1, 101.0)]}, {REPEATED}),
    "event redelivered": ({"arrivals": [*ARRIVALS, arrival(CREATED, 1, 101.0, redelivered=True)]}, set()),
    "repeated after a fault": (span("relay killed", 100.2, 100.3), set()),
    "fault of another kind": (span("mail server down", 100.2, 100.3, repeats_events=False), {REPEATED}),
    "fault over before": (span("relay killed", 90.0, 91.0), {REPEATED}),
    "fault begun later": (span("relay killed", 102.0, 103.0), {REPEATED}),
    "copies while a queue refuses": (refused(3), set()),
    "too many of them": (refused(4), {"copies bounded while a queue refuses"}),
    "which another fault explains": (refused(20, RELAY_KILLED), set()),
    "second e-mail": ({"acceptances": [acceptance(100.1), acceptance(104.0)]}, {SENT_ONCE}),
    "e-mail after a lost answer": (
        {"acceptances": [acceptance(100.1, answered=False), acceptance(104.0)]},
        set(),
    ),
    "sender killed between": (killed(SENDER, 100.15), set()),
    "sender killed before the acceptance": (killed(SENDER, 100.05), set()),
    "another sender killed": (killed(OTHER_SENDER, 100.15), {SENT_ONCE}),
    "sender killed long before": (killed(SENDER, 89.0), {SENT_ONCE}),
    "sender killed later": (killed(SENDER, 105.0), {SENT_ONCE}),
    "frozen with the answer": (frozen((SENDER, 100.1), (OTHER_SENDER, 131.0)), set()),
    "frozen, sent again by itself": (frozen((SENDER, 100.1), (SENDER, 131.0)), {SENT_ONCE}),
    "frozen, claim not over": (frozen((SENDER, 100.1), (OTHER_SENDER, 103.0)), {SENT_ONCE}),
    "frozen, long recorded": (frozen((SENDER, 90.0), (OTHER_SENDER, 131.0)), {SENT_ONCE}),
    "frozen before the content": (frozen((OTHER_SENDER, 131.0), (SENDER, 134.0)), {SENT_ONCE}),
    "published just after": (read_only(99.0), set()),
    "published while read-only": (read_only(97.5), {"nothing published while read only"}),
    "another uuid for a key": (
        {"answers": [*ANSWERS, Answer("case-1", 200, "req_9", is_replay=True)]},
        {ONE_REQUEST},
    ),
    "new twice": ({"answers": [*ANSWERS, Answer("case-1", 200, UUID)]}, {ONE_REQUEST}),
    "second row for a key": ({"stored": [stored(UUID), stored("req_9")]}, {ONE_REQUEST, LOST}),
    "second event for a key": (
        {"arrivals": [*ARRIVALS, Arrival("req_9.request.created.1", "case-1", CREATED, 1, 101.0)]},
        {ONE_REQUEST, INVERTED},
    ),
    "second e-mail for a key": (
        {"acceptances": [acceptance(100.1), acceptance(101.0, message_id="req_9.invitation.1@x")]},
        {ONE_REQUEST, RECIPIENTS},
    ),
    "e-mail to somebody else": (
        {"acceptances": [acceptance(100.1, recipient="mallory@example.com")]},
        {RECIPIENTS},
    ),
    "secret stored": ({"secrets_stored": ["req_1"]}, {"no secret stored"}),
    "probe without an answer": ({"calls": {LIVEZ: [True] * 999 + [False]}}, {SERVED}),
    "a call without an answer": ({"calls": {"GET /": [True] * 99 + [False]}}, set()),
    "calls without an answer": ({"calls": {"GET /": [True] * 98 + [False] * 2}}, {SERVED}),
    "much": (
        {"peaks": {"api-1": [200.0], "calculations-1": [150.0], MAIL_CONNECTIONS: [4.0]}},
        set(),
    ),
    "too much memory of an API": ({"peaks": {"api-1": [200.1, 9.0]}}, {BOUNDED}),
    "too much memory of a worker": ({"peaks": {"calculations-1": [150.1]}}, {BOUNDED}),
    "connections left open": ({"peaks": {MAIL_CONNECTIONS: [5.0]}}, {BOUNDED}),
    "calculation in a flood": (flooded(), set()),
    "late calculation": (flooded(calculated=105.1), {"calculations in time"}),
    "late calculation, another fault": (flooded(RELAY_KILLED, calculated=105.1), set()),
    "full outbox": ({"outbox_left": 1}, {"outbox drained"}),
    "poison gone": ({"held": {"poison-0"}}, {"outbox drained"}),
    "another held": ({"held": {*POISON, "req_1 request.created"}}, {"outbox drained"}),
    "no dead letters": ({"dead_letters": set()}, {"dead letters are poison"}),
    "another dead letter": ({"dead_letters": {*POISON, "req_1"}}, {"dead letters are poison"}),
    "slow recovery": ({"recoveries": [(["RabbitMQ killed"], 5.1)]}, {"recovery in time"}),
    "exception or death": ({"exceptions": ["relay-1 exited"]}, {"no unhandled exceptions"}),
    "no answer of an API": ({"statuses": Counter(), "answers": []}, {"plan fulfilled"}),
    "plan cut short": ({"shortfalls": ["relay killed: not seen 20 times"]}, {"plan fulfilled"}),
    "outage not named": ({"unnamed": ["disk alarm: doctor"]}, {"outages named"}),
    "other answers": ({"statuses": Counter({200: 1, 500: 1})}, {DOCUMENTED}),
    "in flight": ({"answers": [*ANSWERS, Answer("case-1", 409, None)]}, set()),
    "unavailable": ({"answers": [*ANSWERS, Answer("case-1", 503, None)]}, set()),
    "other answers to a key": (
        {"answers": [*ANSWERS, Answer("case-1", 500, None)]},
        {DOCUMENTED},
    ),
}


async def test_fault_counts_only_if_its_effect_was_seen():
    async def inject_nothing(_: Any) -> bool:
        return False

    fault = Fault("relay killed", inject_nothing, frozenset(), repeats_events=True)
    record = Record(acknowledged=RECORD.acknowledged)
    world: Any = SimpleNamespace(record=record)
    await fault.happen(world)

    assert list(shortfalls_of([fault], record)) == ["relay killed: not seen 1 times"]


def test_run_in_which_nothing_happened_fails():
    assert list(shortfalls_of([], Record())) == ["0 requests were acknowledged, not 1"]
    assert check_all(Record()).keys() == {"plan fulfilled"}


@pytest.mark.parametrize(("change", "breaches"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_record_breaches_only_what_it_should(change, breaches):
    assert check_all(msgspec.structs.replace(RECORD, **change)).keys() == breaches


def test_errors_are_found_in_the_logs_that_our_processes_write(capsys):
    with restored_logging():
        logs.configure(Settings(database_url="postgresql://host/database"))
        structlog.get_logger().error("message_failed", error="ValueError")
        structlog.get_logger().warning("message_retried")
        structlog.get_logger().error("message_not_settled")
        logging.getLogger("aio_pika").error("Connection lost")
        logging.getLogger("asyncio").error("Task exception was never retrieved")
    lines = capsys.readouterr().out.splitlines()

    assert [is_suspicious(line) for line in lines] == [True, False, False, False, True]
    assert is_suspicious("Traceback (most recent call last):")
