"""The invariants, judged from the record of a run alone."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.faults.others import calculation_of
from tests.faults.records import LIVEZ, Acceptance, Arrival, Event, Record, Span

# Megabytes of memory by role. Two senders try one connection each, and each may be closing another.
_MOST = {"api": 200.0, "calculations": 150.0, "mail connections": 4.0}


def check_all(record: Record) -> dict[str, list[str]]:
    """Return the breaches of every invariant that has any, by its name."""
    checks = {name: check for name, check in vars(Invariants).items() if not name.startswith("_")}
    found = {name.replace("_", " "): list(check(Invariants(record))) for name, check in checks.items()}
    return {name: breaches for name, breaches in found.items() if breaches}


@dataclass(frozen=True)
class Invariants:
    """Each public method is an invariant, and yields its breaches."""

    _record: Record

    def plan_fulfilled(self) -> Iterator[str]:
        """Every fault was seen as often as planned, and creates of each kind were answered."""
        yield from self._record.shortfalls
        if not self._record.statuses[200]:
            yield "no create over HTTP without a key got 200"
        if not any(answer.uuid for answer in self._record.answers):
            yield "no create with a key got 200"

    def nothing_lost(self) -> Iterator[str]:
        """Every acknowledged request is stored. Each stored one has its events, e-mail and calculation."""
        stored = {request.key: request for request in self._record.stored}
        arrived = defaultdict(set)
        for arrival in self._record.arrivals:
            arrived[arrival.key].add(arrival.type)
        for key in (self._record.acknowledged.keys() | arrived.keys()) - stored.keys():
            yield f"{key} is not stored; acknowledged: {key in self._record.acknowledged}, {arrived[key]}"
        mailed = {uuid_in(acceptance.message_id) for acceptance in self._record.acceptances}
        for key, request in stored.items():
            outcome = Event.EMAIL_FAILED if request.is_refused else Event.EMAIL_SENT
            expected = {Event.CREATED, Event.CALCULATED, outcome}
            if arrived[key] != expected:
                yield f"{key}: {sorted(arrived[key])} arrived, not {sorted(expected)}"
            if request.calculation_id != calculation_of(request.uuid):
                yield f"{key} has the calculation {request.calculation_id}"
            if (request.uuid in mailed) == request.is_refused:
                yield f"{key}: the mail server has {'an' if request.is_refused else 'no'} e-mail"

    def no_inversions(self) -> Iterator[str]:
        """The first deliveries of a request's events are in the order of their sequence.

        If a node of RabbitMQ fails, it may deliver an event again after later ones, and then marks it.
        """
        arrivals = self._record.arrivals
        marked = {(arrival.key, arrival.sequence) for arrival in arrivals if arrival.redelivered}
        latest: Counter[str] = Counter()
        seen: set[str] = set()
        for arrival in arrivals:
            if arrival.event_id not in seen:
                seen.add(arrival.event_id)
                expected = latest[arrival.key] + 1
                overtaken = range(expected, arrival.sequence) or [arrival.sequence]
                if arrival.sequence != expected and any((arrival.key, n) not in marked for n in overtaken):
                    yield f"{arrival.event_id} came after sequence {latest[arrival.key]}"
                latest[arrival.key] = max(latest[arrival.key], arrival.sequence)

    def repeats_only_near_a_fault(self) -> Iterator[str]:
        """An event comes again only if a fault may have kept its confirm from being settled."""
        for first, again, span in repeats(self._record):
            if span is None:
                yield f"{again.event_id} came again after {again.at - first.at:.2f} s, in no fault's window"

    def copies_bounded_while_a_queue_refuses(self) -> Iterator[str]:
        """Others get a refused event once, and once more after each of its doubling pauses."""
        again = [(first, arrival.at) for first, arrival, _ in repeats(self._record)]
        for refusal in filter(self._is_alone, self._record.refusals):
            allowed = math.floor(math.log2(refusal.ended - refusal.began + 1)) + 1
            copies = Counter(
                first.event_id for first, at in again if refusal.began <= first.at and at <= refusal.ended
            )
            for event_id, number in copies.items():
                if number > allowed:
                    yield f"{event_id}: {number} copies during {refusal}, more than {allowed}"

    def nothing_published_while_read_only(self) -> Iterator[str]:
        """A relay that cannot settle does not publish: it would publish the same events again and again."""
        for silence in filter(self._is_alone, self._record.read_only):
            began = silence.began + 2.0  # after which a batch that had begun is done
            published = sum(began < arrival.at < silence.ended for arrival in self._record.arrivals)
            if published:
                yield f"{published} events in {silence.ended - began:.1f} s in which none could be settled"

    def _is_alone(self, period: Span) -> bool:
        """Whether no other fault happened at the same time: others cause copies, too."""
        spans = self._record.spans
        return sum(span.began <= period.ended and period.began <= span.ended for span in spans) == 1

    def others_served(self) -> Iterator[str]:
        """In a flood of one caller or team, others get answers: every probe, and 99 % of the calls.

        So do the callers of an API whose clock is wrong: refused tokens would prove nothing.
        """
        for call, answers in self._record.calls.items():
            unanswered = answers.count(False)
            if unanswered > (0 if call == LIVEZ else 0.01 * len(answers)):
                yield f"{unanswered} of {len(answers)} calls got no answer: {call}"

    def calculations_in_time(self) -> Iterator[str]:
        """While one team floods the queue of calculations, those of others are recorded within the bar."""
        at: dict[str, dict[str, float]] = defaultdict(dict)
        for arrival in self._record.arrivals:
            at[arrival.type].setdefault(arrival.key, arrival.at)
        for flood in filter(self._is_alone, self._record.floods):
            for key, created in at[Event.CREATED].items():
                seconds = at[Event.CALCULATED].get(key, math.inf) - created
                if flood.began <= created <= flood.ended and seconds > self._record.plan.recovery:
                    yield f"{key}: {seconds:.1f} s"

    def resources_bounded(self) -> Iterator[str]:
        """In a flood no process takes more memory than its limit. Connections without e-mails are closed."""
        for name, values in self._record.peaks.items():
            most = _MOST[name.partition("-")[0]]
            if max(values) > most:
                yield f"{name}: {max(values):.0f}, more than {most:.0f}"

    def one_key_is_one_request(self) -> Iterator[str]:
        """One Idempotency-Key has one uuid in all answers, one row, one request.created and one e-mail."""
        record = self._record
        keys = {row.recipient: row.key for row in record.stored}
        found = {("uuids", row.key, row.uuid) for row in record.stored}
        found |= {("uuids", answer.key, answer.uuid) for answer in record.answers if answer.uuid}
        created = (arrival for arrival in record.arrivals if arrival.type == Event.CREATED)
        found |= {("events", arrival.key, arrival.event_id) for arrival in created}
        found |= {("e-mails", keys.get(each.recipient, ""), each.message_id) for each in record.acceptances}
        numbers = Counter((what, key) for what, key, _ in found)
        new = (answer.key for answer in record.answers if answer.uuid and not answer.is_replay)
        numbers.update(("answers that call it new", key) for key in new)
        yield from (f"{key} has {number} {what}" for (what, key), number in numbers.items() if number > 1)

    def emails_sent_once(self) -> Iterator[str]:
        """An e-mail is sent again only if the reply was lost: the mail server died, or the sender did.

        A sender that is frozen with the reply counts as dead. A sender that wakes before it has sent the
        content must not send it: its claim has expired.
        """
        for first, again in second_emails(self._record):
            if first.answered and not self._was_killed(first, again) and not self._was_frozen(first, again):
                yield (
                    f"{first.message_id} was accepted from {first.process} and {again.at - first.at:.2f} s "
                    f"later from {again.process}: neither the mail server nor the sender died"
                )

    def _was_frozen(self, first: Acceptance, again: Acceptance) -> bool:
        """Whether the first sender froze before it can have recorded the reply, and its claim expired.

        Its content may be on the way for a second after the freeze. The reply may wait 5 s for Postgres.
        """
        return any(
            freeze.name == first.process != again.process
            and freeze.began - 5.0 <= first.at <= freeze.began + 1.0
            and freeze.began + self._record.plan.email_claim_seconds / 2 <= again.at
            for freeze in self._record.freezes
        )

    def _was_killed(self, first: Acceptance, again: Acceptance) -> bool:
        """Whether the first sender was killed, perhaps before the acceptance, when its bytes had left."""
        kills = (at for name, at in self._record.kills if name == first.process)
        return any(first.connected_at <= at <= again.at for at in kills)

    def emails_reach_their_recipient(self) -> Iterator[str]:
        """Each e-mail goes to the customer of the request in its Message-ID."""
        recipients = {request.uuid: request.recipient for request in self._record.stored}
        for acceptance in self._record.acceptances:
            expected = recipients.get(uuid_in(acceptance.message_id))
            if acceptance.recipient != expected:
                yield f"{acceptance.message_id} went to {acceptance.recipient}, not to {expected}"

    def outbox_drained(self) -> Iterator[str]:
        """The outbox is empty. Of the held events only poison rows and their followers are left."""
        if self._record.outbox_left:
            yield f"{self._record.outbox_left} events are left in the outbox"
        yield from (f"wrong: {each[:80]}" for each in self._record.held ^ self._record.poison_rows)

    def dead_letters_are_poison(self) -> Iterable[str]:
        return self._record.dead_letters ^ self._record.poison_messages

    def recovery_in_time(self) -> Iterator[str]:
        """Soon after a fault, new requests are published within the bar."""
        for faults, seconds in self._record.recoveries:
            if seconds > self._record.plan.recovery:
                yield f"{seconds:.1f} s after {' + '.join(faults)}"

    def answers_as_documented(self) -> Iterator[str]:
        """The API answers 200, 503 while Postgres is down, or 409 while a create with the same key runs."""
        wrong = [*(self._record.statuses.keys() - {200, 503})]
        wrong += {answer.status for answer in self._record.answers} - {200, 409, 503}
        yield from (f"HTTP {status}" for status in wrong)

    def no_secret_stored(self) -> Iterable[str]:
        """The secret of a link that the mail server quotes is not stored with its reply."""
        return self._record.secrets_stored

    def no_unhandled_exceptions(self) -> Iterable[str]:
        """No process logs an unexpected exception or dies of one, and SIGTERM ends each with status 0."""
        return self._record.exceptions

    def outages_named(self) -> Iterable[str]:
        """While RabbitMQ or Postgres shuts a process out, its readiness probe and `doctor` say so."""
        return self._record.unnamed


def repeats(record: Record) -> Iterator[tuple[Arrival, Arrival, Span | None]]:
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

    It may be confirmed 3 s before the fault that keeps it from being settled. It may come again 15 s after
    that, after timeouts and a backlog, and after a pause that is at most as long as it has been refused.
    """
    pause = max(0.0, span.ended - first.at)
    return span.began <= again.at <= span.ended + pause + 15.0 and first.at - 3.0 <= span.ended


def second_emails(record: Record) -> Iterator[tuple[Acceptance, Acceptance]]:
    """Return every acceptance of an e-mail accepted before, after the earlier acceptance."""
    latest: dict[str, Acceptance] = {}
    for acceptance in record.acceptances:
        if acceptance.message_id in latest:
            yield latest[acceptance.message_id], acceptance
        latest[acceptance.message_id] = acceptance


def uuid_in(message_id: str) -> str:
    return message_id.partition(".")[0]
