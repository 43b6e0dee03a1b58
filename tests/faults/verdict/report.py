"""The figures of a run as a table, and its breaches as text."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from tests.faults.verdict.invariants import repeats, second_emails
from tests.faults.verdict.records import Record

_SHOWN = 12  # breaches of one invariant
_LINE = "{:34}{:>7}{:>17}{:>9}{:>17}{:>16}"
_MIXED = "(mixed: up to three at once)"


def table(record: Record) -> str:
    """Return the figures of a run as a table: a line for each fault, and the totals."""
    repeated = Counter(span.fault if span else "none" for _, _, span in repeats(record))
    times = Counter(span.fault for span in record.spans)
    waits = _email_waits(record)
    recoveries: defaultdict[str, list[float]] = defaultdict(list)
    for faults, recovery in record.recoveries:
        recoveries[_MIXED if len(faults) > 1 else faults[0]].append(recovery)
    lines = [_LINE.format("fault", "times", "recovery median", "worst", "events repeated", "longest e-mail")]
    for fault in [*sorted(times), _MIXED]:
        seconds = recoveries[fault]
        worst = [f"{figure(seconds):.2f} s" if seconds else "" for figure in (median, max)]
        lines.append(_LINE.format(fault, times[fault], *worst, repeated[fault], f"{waits[fault]:.1f} s"))
    return "\n".join([*lines, "", _totals(record, repeated.total())])


def _email_waits(record: Record) -> Mapping[str, float]:
    """Return by fault the longest time from a create during it to the first acceptance of its e-mail."""
    mailed = {acceptance.recipient: acceptance.at for acceptance in reversed(record.acceptances)}
    waits: defaultdict[str, float] = defaultdict(float)
    for request in record.stored:
        if request.key in record.acknowledged and request.recipient in mailed:
            at = record.acknowledged[request.key]
            for span in record.spans:
                if span.began <= at <= span.ended:
                    waits[span.fault] = max(waits[span.fault], mailed[request.recipient] - at)
    return waits


def _totals(record: Record, repeated: int) -> str:
    calls = {call: f"{answers.count(True)} of {len(answers)}" for call, answers in record.calls.items()}
    peaks = {name: round(max(values)) for name, values in record.peaks.items()}
    return (
        f"{record.seconds:.0f} s, {len(record.acknowledged)} requests acknowledged, {len(record.stored)} "
        f"stored, {len({answer.key for answer in record.answers})} keys "
        f"(answers: {dict(Counter(answer.status for answer in record.answers))}), "
        f"{len({arrival.event_id for arrival in record.arrivals})} events (+ {repeated} repeats), "
        f"{len(record.acceptances)} e-mails accepted ({sum(1 for _ in second_emails(record))} repeats), "
        f"{len(record.poison_rows)} poison rows, {len(record.poison_messages)} poison messages\n"
        f"in floods: answered {calls}, peaks {peaks}"
    )


def verdict(breaches: Mapping[str, Sequence[str]]) -> str:
    lines = []
    for invariant, all_of_it in breaches.items():
        lines.append(f"BREACH: {invariant} ({len(all_of_it)})")
        lines += [f"    {what}" for what in all_of_it[:_SHOWN]]
    return "\n".join(lines) or "every invariant held"
