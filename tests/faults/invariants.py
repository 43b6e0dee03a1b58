"""The invariants, judged from the record of a run alone. Every check yields its breaches."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter

from tests.faults.others import calculation_of
from tests.faults.records import (
    CALCULATED,
    CREATED,
    EMAIL_FAILED,
    EMAIL_SENT,
    LIVEZ,
    MAIL_CONNECTIONS,
    Acceptance,
    Arrival,
    Interval,
    Record,
    Span,
)

_BEFORE_SECONDS = 3.0  # an event may be confirmed this long before the fault that keeps it from being settled
_AFTER_SECONDS = 15.0  # and come again this long after the fault: after timeouts, pauses and a backlog
_PASS_SECONDS = 2.0  # after which a batch that had begun is done
_RECORDING_SECONDS = 5.0  # a mail server's reply may wait this long for Postgres
_ON_THE_WAY_SECONDS = 1.0  # content that had left its sender before the freeze
# Megabytes of memory by role. Two senders try one connection each, and each may be closing another.
_MOST = {"api": 200.0, "calculations": 150.0, MAIL_CONNECTIONS: 4.0}
_UNANSWERED = 0.01  # the share of calls


def check_all(record: Record) -> dict[str, list[str]]:
    """Return the breaches of every invariant that has any, by its name."""
    found = {name: list(check(record)) for name, check in CHECKS.items()}
    return {name: breaches for name, breaches in found.items() if breaches}


def plan_fulfilled(record: Record) -> Iterable[str]:
    """Every fault was seen as often as planned, and creates of each kind were answered."""
    yield from record.shortfalls
    if not record.statuses[200]:
        yield "no create over HTTP without a key got 200"
    if not any(answer.uuid for answer in record.answers):
        yield "no create with a key got 200"


def nothing_lost(record: Record) -> Iterable[str]:
    """Every acknowledged request is stored. Every stored one has all its events, e-mail and calculation."""
    stored = {request.key: request for request in record.stored}
    arrived = defaultdict(set)
    for arrival in record.arrivals:
        arrived[arrival.key].add(arrival.type)
    for key in (record.acknowledged.keys() | arrived.keys()) - stored.keys():
        yield f"{key} is not stored: acknowledged {key in record.acknowledged}, events {arrived[key]}"
    mailed = {uuid_in(acceptance.message_id) for acceptance in record.acceptances}
    for key, request in stored.items():
        expected = {CREATED, CALCULATED, EMAIL_FAILED if request.is_refused else EMAIL_SENT}
        if arrived[key] != expected:
            yield f"{key}: {sorted(arrived[key])} arrived, not {sorted(expected)}"
        if request.calculation_id != calculation_of(request.uuid):
            yield f"{key} has the calculation {request.calculation_id}"
        if (request.uuid in mailed) == request.is_refused:
            yield f"{key}: the mail server has {'an' if request.is_refused else 'no'} e-mail"


def no_inversions(record: Record) -> Iterable[str]:
    """The first deliveries of a request's events are in the order of their sequence.

    If a node of RabbitMQ fails, it may deliver an event again after later ones, and then marks it.
    """
    marked = {(arrival.key, arrival.sequence) for arrival in record.arrivals if arrival.redelivered}
    seen: set[str] = set()
    latest: Counter[str] = Counter()
    for arrival in record.arrivals:
        if arrival.event_id not in seen:
            seen.add(arrival.event_id)
            expected = latest[arrival.key] + 1
            overtaken = range(expected, arrival.sequence) or [arrival.sequence]
            if arrival.sequence != expected and any((arrival.key, each) not in marked for each in overtaken):
                yield f"{arrival.event_id} came after sequence {latest[arrival.key]}"
            latest[arrival.key] = max(latest[arrival.key], arrival.sequence)


def repeats_explained(record: Record) -> Iterable[str]:
    """An event comes again only if a fault may have kept its confirm from being settled."""
    for first, again, span in repeats(record):
        if span is None:
            yield f"{again.event_id} came again after {again.at - first.at:.2f} s, in no fault's window"


def repeats(record: Record) -> Iterable[tuple[Arrival, Arrival, Span | None]]:
    """Return every repeat: the first arrival, the repeated one, and the fault that explains it.

    A redelivery by the broker, after the auditor lost its connection, is no repeat.
    """
    spans = sorted((span for span in record.spans if span.repeats_events), key=lambda span: -span.began)
    first: dict[str, Arrival] = {}
    for again in record.arrivals:
        earliest = first.setdefault(again.event_id, again)
        if earliest is not again and not again.redelivered:
            yield earliest, again, next((span for span in spans if _explains(span, earliest, again)), None)


def _explains(span: Span, first: Arrival, again: Arrival) -> bool:
    """Whether an event arrived for the first time in the window of a fault.

    A refused event comes again after a pause that is at most as long as it has been refused.
    """
    pause = max(0.0, span.ended - first.at)
    is_in_time = span.began <= again.at <= span.ended + pause + _AFTER_SECONDS
    return is_in_time and first.at - _BEFORE_SECONDS <= span.ended


def copies_bounded(record: Record) -> Iterable[str]:
    """While a queue refuses an event, others get it once, and once more after each of its doubling pauses."""
    again = [(first, arrival.at) for first, arrival, _ in repeats(record)]
    for refusal in filter(partial(_by_itself, record), record.refusals):
        allowed = math.floor(math.log2(refusal.ended - refusal.began + 1)) + 1
        copies = Counter(
            first.event_id for first, at in again if refusal.began <= first.at and at <= refusal.ended
        )
        for event_id, number in copies.items():
            if number > allowed:
                yield f"{event_id}: {number} copies during {refusal}, more than {allowed}"


def nothing_published_while_read_only(record: Record) -> Iterable[str]:
    """A relay that cannot settle does not publish: it would publish the same events again and again."""
    for silence in filter(partial(_by_itself, record), record.read_only):
        began = silence.began + _PASS_SECONDS
        published = sum(began < arrival.at < silence.ended for arrival in record.arrivals)
        if published:
            yield f"{published} events in {silence.ended - began:.1f} s in which none could be settled"


def _by_itself(record: Record, interval: Interval) -> bool:
    """Whether no other fault happened at the same time: others cause copies, too."""
    return sum(span.began <= interval.ended and interval.began <= span.ended for span in record.spans) == 1


def others_served(record: Record) -> Iterable[str]:
    """In a flood of one caller or team, others get answers: every probe, and 99 % of the calls.

    So do the callers of an API whose clock is wrong: refused tokens would prove nothing.
    """
    for call, answers in record.calls.items():
        unanswered = answers.count(False)
        if unanswered > (0 if call == LIVEZ else _UNANSWERED * len(answers)):
            yield f"{unanswered} of {len(answers)} calls got no answer: {call}"


def calculations_in_time(record: Record) -> Iterable[str]:
    """While one team floods the queue of calculations, those of others are recorded within the bar."""
    at: dict[str, dict[str, float]] = defaultdict(dict)
    for arrival in record.arrivals:
        at[arrival.type].setdefault(arrival.key, arrival.at)
    for flood in filter(partial(_by_itself, record), record.floods):
        for key, created in at[CREATED].items():
            seconds = at[CALCULATED].get(key, math.inf) - created
            if flood.began <= created <= flood.ended and seconds > record.plan.recovery:
                yield f"{key}: {seconds:.1f} s"


def resources_bounded(record: Record) -> Iterable[str]:
    """In a flood no process takes more memory than its limit. Connections that take no e-mail are closed."""
    for name, values in record.peaks.items():
        most = _MOST[name.partition("-")[0]]
        if max(values) > most:
            yield f"{name}: {max(values):.0f}, more than {most:.0f}"


def one_request_per_key(record: Record) -> Iterable[str]:
    """One Idempotency-Key has one uuid in all answers, one row, one request.created and one e-mail."""
    keys = {row.recipient: row.key for row in record.stored}
    found = {("uuids", row.key, row.uuid) for row in record.stored}
    found |= {("uuids", answer.key, answer.uuid) for answer in record.answers if answer.uuid}
    found |= {(CREATED, each.key, each.event_id) for each in record.arrivals if each.type == CREATED}
    found |= {("e-mails", keys.get(each.recipient, ""), each.message_id) for each in record.acceptances}
    numbers = Counter((what, key) for what, key, _ in found)
    new = (answer.key for answer in record.answers if answer.uuid and not answer.is_replay)
    numbers.update(("answers that call it new", key) for key in new)
    for (what, key), number in numbers.items():
        if number > 1:
            yield f"{key} has {number} {what}"


def emails_sent_once(record: Record) -> Iterable[str]:
    """An e-mail is sent again only if the reply was lost: the mail server died, or the sender did.

    A sender that is frozen with the reply counts as dead. A sender that wakes before it has sent the content
    must not send it: its claim has expired.
    """
    for first, again in second_emails(record):
        if first.answered and not _was_killed(record, first, again) and not _was_frozen(record, first, again):
            yield (
                f"{first.message_id} was accepted from {first.process} and {again.at - first.at:.2f} s later "
                f"from {again.process}: neither the mail server nor the sender died"
            )


def second_emails(record: Record) -> Iterable[tuple[Acceptance, Acceptance]]:
    """Return every acceptance of an e-mail accepted before, after the earlier acceptance."""
    latest: dict[str, Acceptance] = {}
    for acceptance in record.acceptances:
        if acceptance.message_id in latest:
            yield latest[acceptance.message_id], acceptance
        latest[acceptance.message_id] = acceptance


def _was_frozen(record: Record, first: Acceptance, again: Acceptance) -> bool:
    """Whether the first sender froze before it can have recorded the reply, and its claim expired."""
    return any(
        freeze.process == first.process != again.process
        and freeze.began - _RECORDING_SECONDS <= first.at <= freeze.began + _ON_THE_WAY_SECONDS
        and freeze.began + record.plan.email_claim_seconds / 2 <= again.at
        for freeze in record.freezes
    )


def _was_killed(record: Record, first: Acceptance, again: Acceptance) -> bool:
    """Whether the first sender was killed, perhaps before the acceptance, when its bytes had left already."""
    return any(name == first.process and first.connected_at <= at <= again.at for name, at in record.kills)


def emails_reach_their_recipient(record: Record) -> Iterable[str]:
    """Each e-mail goes to the customer of the request in its Message-ID."""
    recipients = {request.uuid: request.recipient for request in record.stored}
    for acceptance in record.acceptances:
        expected = recipients.get(uuid_in(acceptance.message_id))
        if acceptance.recipient != expected:
            yield f"{acceptance.message_id} went to {acceptance.recipient}, not to {expected}"


def uuid_in(message_id: str) -> str:
    return message_id.partition(".")[0]


def outbox_drained(record: Record) -> Iterable[str]:
    """The outbox is empty. Of the held events only poison rows and their followers are left."""
    if record.outbox_left:
        yield f"{record.outbox_left} events are left in the outbox"
    yield from _differences(record.held, record.poison_rows)


def dead_letters_are_poison(record: Record) -> Iterable[str]:
    return _differences(record.dead_letters, record.poison_messages)


def _differences(found: set[str], expected: set[str]) -> Iterable[str]:
    yield from (f"missing: {each[:80]}" for each in expected - found)
    yield from (f"not expected: {each[:80]}" for each in found - expected)


def recovery_in_time(record: Record) -> Iterable[str]:
    """Soon after a fault, new requests are published within the bar."""
    for faults, seconds in record.recoveries:
        if seconds > record.plan.recovery:
            yield f"{seconds:.1f} s after {' + '.join(faults)}"


def answers_as_documented(record: Record) -> Iterable[str]:
    """The API answers 200, 503 while Postgres is down, or 409 while a create with the same key runs."""
    wrong = [status for status in record.statuses if status not in (200, 503)]
    wrong += {answer.status for answer in record.answers} - {200, 409, 503}
    yield from (f"HTTP {status}" for status in wrong)


CHECKS: Mapping[str, Callable[[Record], Iterable[str]]] = {
    "plan fulfilled": plan_fulfilled,
    "nothing lost": nothing_lost,
    "no inversions": no_inversions,
    "repeats only in a fault's unconfirmed window": repeats_explained,
    "copies bounded while a queue refuses": copies_bounded,
    "nothing published while Postgres is read-only": nothing_published_while_read_only,
    "others are served": others_served,
    "calculations in time": calculations_in_time,
    "resources bounded": resources_bounded,
    "one key is one request": one_request_per_key,
    "e-mails sent once": emails_sent_once,
    "e-mails reach their recipient": emails_reach_their_recipient,
    "outbox drained": outbox_drained,
    "dead letters are poison": dead_letters_are_poison,
    "recovery in time": recovery_in_time,
    "HTTP answers": answers_as_documented,
    # The secret of a link that the mail server quotes is not stored with its reply.
    "no secret stored": attrgetter("secrets_stored"),
    # No process logs an unexpected exception or dies of one, and SIGTERM ends each with status 0.
    "no unhandled exceptions": attrgetter("exceptions"),
    # While RabbitMQ or Postgres shuts a process out, its readiness probe and `doctor` say so.
    "outages named": attrgetter("unnamed"),
}
