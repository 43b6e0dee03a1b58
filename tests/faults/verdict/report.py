"""The figures of a run as a table, and its breaches as text."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from tests.faults.verdict import latency
from tests.faults.verdict.invariants import repeats, second_emails
from tests.faults.verdict.records import Record

_SHOWN = 12  # breaches of one invariant


def table(record: Record) -> str:
    """Return the figures of a run as a table: a line for each fault, and the totals."""
    repeated = Counter(span.fault if span else "none" for _, _, span in repeats(record))
    times = Counter(span.fault for span in record.spans)
    waits = latency.email_waits(record)
    alone: dict[str, list[float]] = defaultdict(list)
    mixed: list[float] = []
    for recovery in record.recoveries:
        (mixed if len(recovery.faults) > 1 else alone[recovery.faults[0]]).append(recovery.seconds)
    lines = [_line("fault", "times", "recovery median", "worst", "events repeated", "longest e-mail")]
    lines += [
        _line(
            fault, str(times[fault]), *_recovery(alone[fault]), str(repeated[fault]), f"{waits[fault]:.1f} s"
        )
        for fault in sorted(times)
    ]
    lines.append(_line("(mixed: up to three at once)", "", *_recovery(mixed), "", ""))
    return "\n".join([*lines, "", _totals(record, repeated.total())])


def _line(fault: str, times: str, recovery: str, worst: str, repeated: str, email: str) -> str:
    return f"{fault:34}{times:>7}{recovery:>17}{worst:>9}{repeated:>17}{email:>16}"


def _recovery(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{median(seconds):.2f} s", f"{max(seconds):.2f} s") if seconds else ("", "")


def _totals(record: Record, repeated: int) -> str:
    keys = {answer.key for answer in record.answers}
    totals = (
        f"{record.seconds:.0f} s, {len(record.acknowledged)} requests acknowledged "
        f"(+ {len(record.unknown)} of unknown outcome, {len(record.stored)} stored), {len(keys)} keys "
        f"(answers: {dict(Counter(answer.status for answer in record.answers))}), "
        f"{len({arrival.event_id for arrival in record.arrivals})} events (+ {repeated} repeats), "
        f"{len(record.acceptances)} e-mails accepted ({sum(1 for _ in second_emails(record))} repeats), "
        f"{len(record.poison_rows)} poison rows, {len(record.poison_messages)} poison messages"
    )
    calls = {call: f"{answers.count(True)} of {len(answers)}" for call, answers in record.calls.items()}
    peaks = {process: f"{megabytes:.0f} MB" for process, megabytes in record.peaks.items()}
    return f"{totals}\nin floods: answered {calls}, peaks of memory {peaks}"


def verdict(breaches: Mapping[str, Sequence[str]]) -> str:
    lines = []
    for invariant, all_of_it in breaches.items():
        lines.append(f"BREACH: {invariant} ({len(all_of_it)})")
        lines += [f"    {what}" for what in all_of_it[:_SHOWN]]
    return "\n".join(lines) or "every invariant held"
