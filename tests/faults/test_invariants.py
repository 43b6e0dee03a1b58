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
from tests.faults.catalogue.fault import Fault
from tests.faults.run import shortfalls_of
from tests.faults.verdict.invariants import check_all
from tests.faults.verdict.records import (
    CALCULATED,
    CREATED,
    EMAIL_SENT,
    LIVEZ,
    Acceptance,
    Answer,
    Arrival,
    Commit,
    Interval,
    Kill,
    Record,
    Recovery,
    Span,
    Stored,
)
from tests.faults.verdict.stocktaking import is_suspicious
from tests.faults.world.teams import calculation_of
from tests.faults.world.world import World
from tests.harness.command_line import restored_logging

UUID = "req_1"
MESSAGE_ID = f"{UUID}.invitation.1@service.example.com"
SENDER, OTHER_SENDER = "notifications-1", "notifications-2"
ONE_REQUEST = "one key is one request"


def arrival(type_: str, sequence: int, at: float, *, redelivered: bool = False) -> Arrival:
    return Arrival(f"{UUID}.{type_}.{sequence}", "case-1", type_, sequence, at, redelivered)


def acceptance(at: float, **facts: Any) -> Acceptance:
    usual = Acceptance(MESSAGE_ID, "ada@example.com", SENDER, 89.9, at)
    return msgspec.structs.replace(usual, **facts)


ARRIVALS = [arrival(CREATED, 1, 100.0), arrival(CALCULATED, 2, 100.2), arrival(EMAIL_SENT, 3, 100.3)]
ANSWERS = [Answer("case-1", 200, UUID), Answer("case-1", 200, UUID, is_replay=True)]
HELD = {"req_2 poison", "req_2 request.calculated"}
POISON = "notifications poison-0"
COMMIT = Commit(99.9)
# One request that has gone through the whole chain, a poison row and a poison message.
RECORD = Record(
    acknowledged={"case-1": COMMIT},
    statuses=Counter({200: 1}),
    answers=ANSWERS,
    stored=[Stored("case-1", UUID, "ada@example.com", calculation_of(UUID))],
    arrivals=ARRIVALS,
    acceptances=[acceptance(100.1)],
    recoveries=[Recovery(("relay killed",), 0.4)],
    held=HELD,
    poison_rows={"req_2 poison"},
    poison_followers={"req_2 request.calculated"},
    poison_messages={POISON},
    dead_letters=[POISON],
)

PLAN: Any = SimpleNamespace(requests=0, times=1)
REPEATED = "repeats only in a fault's unconfirmed window"
SERVED = "others are served"
SENT_ONCE = "e-mails sent once"
LATER = Arrival("req_3.request.created.1", "case-3", CREATED, 1, 101.0)
UNCALCULATED = Stored("case-1", UUID, "ada@example.com", None)
AGAIN = [*ARRIVALS, arrival(CREATED, 1, 101.0)]
RELAY_KILLED = Span("relay killed", 101.0, 101.5, repeats_events=True)


def span(fault: str, began: float, ended: float, *, repeats_events: bool = True) -> dict[str, Any]:
    """Return a fault, and an event that came again after it."""
    return {"spans": [Span(fault, began, ended, repeats_events)], "arrivals": AGAIN}


def killed(process: str, at: float) -> dict[str, Any]:
    """Return an e-mail that its sender sent twice, and a SIGKILL."""
    return {"kills": [Kill(process, at)], "acceptances": [acceptance(100.1), acceptance(104.0)]}


def frozen(first: tuple[str, float], again: tuple[str, float]) -> dict[str, Any]:
    """Return an e-mail that was sent twice, and a SIGSTOP to its usual sender."""
    acceptances = [acceptance(at, process=process) for process, at in (first, again)]
    return {"freezes": [Interval(100.2, 133.9, SENDER)], "acceptances": acceptances}


def refused(copies: int, *others: Span) -> dict[str, Any]:
    """Return a queue that refused for three seconds, and copies of an event meanwhile."""
    return {
        "refusals": [Interval(99.0, 102.0)],
        "spans": [Span("messages refused", 98.9, 102.1, repeats_events=True), *others],
        "arrivals": [*ARRIVALS, *[arrival(CREATED, 1, 101.0)] * copies],
    }


def flooded(*others: Span, calculated: float = 104.9, **facts: Any) -> dict[str, Any]:
    """Return a flood of two seconds, in which a request was created and then calculated."""
    arrivals = [ARRIVALS[0], arrival(CALCULATED, 2, calculated), arrival(EMAIL_SENT, 3, 106.0)]
    spans = [Span("deep messages", 99.0, 101.0, repeats_events=False), *others]
    return {"floods": [Interval(99.0, 101.0)], "spans": spans, "arrivals": arrivals, **facts}


def recovered(seconds: float, *faults: str) -> dict[str, Any]:
    return {"recoveries": [Recovery(faults, seconds)]}


def read_only(began: float) -> dict[str, Any]:
    """Return an event that was published while Postgres had taken no writes since *began*."""
    return {
        "read_only": [Interval(began, 105.0)],
        "spans": [Span("Postgres read-only", began, 105.0, repeats_events=True)],
        "arrivals": ARRIVALS[:1],
    }


# What is changed in the record, and the invariants that are breached by it.
CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "none": ({}, set()),
    "acknowledged, not stored": ({"acknowledged": {"case-1": COMMIT, "case-2": COMMIT}}, {"nothing lost"}),
    "of unknown outcome": ({"unknown": {"case-2"}}, set()),
    "without its last event": ({"arrivals": ARRIVALS[:-1]}, {"nothing lost"}),
    "without its e-mail": ({"acceptances": []}, {"nothing lost"}),
    "without its calculation": ({"stored": [UNCALCULATED]}, {"nothing lost"}),
    "a later event first": (
        {"arrivals": [ARRIVALS[0], arrival(EMAIL_SENT, 3, 100.2), arrival(CALCULATED, 2, 100.3)]},
        {"no inversions"},
    ),
    "an earlier event redelivered": (
        {"arrivals": [ARRIVALS[0], ARRIVALS[2], arrival(CALCULATED, 2, 100.4, redelivered=True)]},
        set(),
    ),
    "event of no stored request": ({"arrivals": [*ARRIVALS, LATER]}, {"nothing lost"}),
    "event repeated": ({"arrivals": AGAIN}, {REPEATED}),
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
    "published just after": (read_only(99.0), {"nothing lost"}),
    "published while read-only": (
        read_only(97.5),
        {"nothing lost", "nothing published while Postgres is read-only"},
    ),
    "another uuid for a key": (
        {"answers": [*ANSWERS, Answer("case-1", 200, "req_9", is_replay=True)]},
        {ONE_REQUEST},
    ),
    "new twice": ({"answers": [*ANSWERS, Answer("case-1", 200, UUID)]}, {ONE_REQUEST}),
    "second row for a key": (
        {
            "stored": [
                Stored("case-1", each, "ada@example.com", calculation_of(each)) for each in (UUID, "req_9")
            ]
        },
        {ONE_REQUEST, "nothing lost"},
    ),
    "second event for a key": (
        {"arrivals": [*ARRIVALS, Arrival("req_9.request.created.1", "case-1", CREATED, 1, 101.0)]},
        {ONE_REQUEST, "no inversions"},
    ),
    "second e-mail for a key": (
        {"acceptances": [acceptance(100.1), acceptance(101.0, message_id="req_9.invitation.1@x")]},
        {ONE_REQUEST, "e-mails reach their recipient"},
    ),
    "e-mail to somebody else": (
        {"acceptances": [acceptance(100.1, recipient="mallory@example.com")]},
        {"e-mails reach their recipient"},
    ),
    "secret stored": ({"secrets_stored": ["req_1"]}, {"no secret stored"}),
    "connections left open": ({"mail_connections": 5}, {"mail connections bounded"}),
    "probe without an answer": (flooded(calls={LIVEZ: [True] * 999 + [False]}), {SERVED}),
    "a call without an answer": (flooded(calls={"GET /": [True] * 99 + [False]}), set()),
    "calls without an answer": (flooded(calls={"GET /": [True] * 98 + [False] * 2}), {SERVED}),
    "much memory": (flooded(peaks={"api-1": 200.0, "calculations-1": 150.0}), set()),
    "too much memory of an API": (flooded(peaks={"api-1": 200.1}), {"memory bounded"}),
    "too much memory of a worker": (flooded(peaks={"calculations-1": 150.1}), {"memory bounded"}),
    "late calculation": (flooded(calculated=105.1), {"calculations in time"}),
    "late calculation, another fault": (flooded(RELAY_KILLED, calculated=105.1), set()),
    "full outbox": ({"outbox_left": 1}, {"outbox drained"}),
    "poison gone": ({"held": set()}, {"outbox drained"}),
    "follower gone": ({"held": {"req_2 poison"}}, {"outbox drained"}),
    "another held": ({"held": {*HELD, "req_1 request.created"}}, {"outbox drained"}),
    "no dead letters": ({"dead_letters": []}, {"dead letters are poison"}),
    "another dead letter": ({"dead_letters": [POISON, "notifications req_1"]}, {"dead letters are poison"}),
    "slow recovery": (recovered(5.1, "RabbitMQ killed"), {"recovery in time"}),
    "exception": ({"log_lines": ['relay-1: {"event": "message_failed"}']}, {"no unhandled exceptions"}),
    "death that nobody caused": ({"deaths": ["relay-1 exited with status 1."]}, {"no unhandled exceptions"}),
    "no answer of an API": ({"statuses": Counter(), "answers": []}, {"plan fulfilled"}),
    "plan cut short": ({"shortfalls": ["relay killed: injected 19 times, not 20"]}, {"plan fulfilled"}),
    "outage not named": ({"unnamed": ["disk alarm: doctor"]}, {"outages named"}),
    "other answers": ({"statuses": Counter({200: 1, 500: 1})}, {"HTTP answers"}),
    "in flight": ({"answers": [*ANSWERS, Answer("case-1", 409, None)]}, set()),
    "unavailable": ({"answers": [*ANSWERS, Answer("case-1", 503, None)]}, set()),
    "other answers to a key": ({"answers": [*ANSWERS, Answer("case-1", 500, None)]}, {"HTTP answers"}),
}


async def test_fault_counts_only_if_its_effect_was_seen():
    async def inject_nothing(_: World) -> bool:
        return False

    fault = Fault("relay killed", inject_nothing, frozenset(), repeats_events=True)
    record = Record(acknowledged=RECORD.acknowledged)
    world: Any = SimpleNamespace(record=record)
    await fault.happen(world)

    assert list(shortfalls_of(PLAN, [fault], record)) == ["relay killed: not seen 1 times"]


def test_run_in_which_nothing_happened_fails():
    assert list(shortfalls_of(PLAN, [], Record())) == ["0 requests were acknowledged, not 1"]
    assert check_all(Record()).keys() == {"plan fulfilled"}


@pytest.mark.parametrize(("change", "breaches"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_record_breaches_only_what_it_should(change, breaches):
    assert check_all(msgspec.structs.replace(RECORD, **change)).keys() == breaches


def test_errors_are_found_in_the_logs_that_our_processes_write(capsys):
    settings = Settings(database_url="postgresql://host/database")
    with restored_logging():
        logs.configure(settings)
        structlog.get_logger().error("message_failed", error="ValueError")
        structlog.get_logger().warning("message_retried")
        structlog.get_logger().error("message_not_settled")
        logging.getLogger("aio_pika").error("Connection lost")
        logging.getLogger("asyncio").error("Task exception was never retrieved")
    lines = capsys.readouterr().out.splitlines()

    assert [is_suspicious(line) for line in lines] == [True, False, False, False, True]
    assert is_suspicious("Traceback (most recent call last):")
