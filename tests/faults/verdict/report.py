"""The figures of a run, as a table and as JSON."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from tests.faults.verdict.invariants import Breach, repeats_by_fault, second_emails
from tests.faults.verdict.records import Record

_SHOWN = 12  # breaches of one invariant


def summary(record: Record, breaches: Sequence[Breach], *, seed: int) -> dict[str, Any]:
    """Return the figures of a run."""
    repeats = repeats_by_fault(record)
    times = Counter(span.fault for span in record.spans)
    alone, mixed = _recoveries(record)
    return {
        "seed": seed,
        "seconds": round(record.seconds, 1),
        "requests_acknowledged": len(record.acknowledged),
        "requests_of_unknown_outcome": len(record.unknown),
        "requests_stored": len(record.stored),
        "keys": len({answer.key for answer in record.answers}),
        "answers_to_keys": dict(Counter(answer.status for answer in record.answers)),
        "events_first_delivered": len({arrival.event_id for arrival in record.arrivals}),
        "events_repeated": repeats.total(),
        "emails_accepted": len(record.acceptances),
        "emails_repeated": sum(1 for _ in second_emails(record)),
        "poison_rows": len(record.poison_rows),
        "poison_messages": len(record.poison_messages),
        "latency_seconds": {name: round(value, 4) for name, value in record.latencies.items()},
        "http_statuses": dict(record.statuses),
        "faults": [
            {
                "fault": fault,
                "times": times[fault],
                "recovery_median_seconds": _rounded(median(alone[fault])) if alone[fault] else None,
                "recovery_worst_seconds": _rounded(max(alone[fault])) if alone[fault] else None,
                "events_repeated": repeats[fault],
            }
            for fault in sorted(times)
        ],
        "recovery_mixed_median_seconds": _rounded(median(mixed)) if mixed else None,
        "recovery_mixed_worst_seconds": _rounded(max(mixed)) if mixed else None,
        "breaches": dict(Counter(breach.invariant for breach in breaches)),
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a table."""
    rows = [("fault", "times", "recovery median", "worst", "events repeated")]
    rows += [
        (
            row["fault"],
            str(row["times"]),
            _seconds(row["recovery_median_seconds"]),
            _seconds(row["recovery_worst_seconds"]),
            str(row["events_repeated"]),
        )
        for row in figures["faults"]
    ]
    rows.append(
        (
            "(mixed: up to three at once)",
            "",
            _seconds(figures["recovery_mixed_median_seconds"]),
            _seconds(figures["recovery_mixed_worst_seconds"]),
            "",
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([*lines, "", _totals(figures)])


def _totals(figures: dict[str, Any]) -> str:
    latency = ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in figures["latency_seconds"].items())
    totals = (
        f"{figures['seconds']:.0f} s, {figures['requests_acknowledged']} requests acknowledged "
        f"(+ {figures['requests_of_unknown_outcome']} of unknown outcome, "
        f"{figures['requests_stored']} stored), {figures['keys']} keys "
        f"(answers: {figures['answers_to_keys']}), {figures['events_first_delivered']} events "
        f"(+ {figures['events_repeated']} repeats), {figures['emails_accepted']} e-mails accepted "
        f"({figures['emails_repeated']} repeats), {figures['poison_rows']} poison rows, "
        f"{figures['poison_messages']} poison messages"
    )
    return f"{totals}\ncommit → consumer: {latency}"


def verdict(breaches: Sequence[Breach]) -> str:
    """Return the breaches as text, at most twelve of each invariant."""
    if not breaches:
        return "every invariant held"
    by_invariant: dict[str, list[str]] = defaultdict(list)
    for breach in breaches:
        by_invariant[breach.invariant].append(breach.what)
    lines = []
    for invariant, all_of_it in by_invariant.items():
        lines.append(f"BREACH: {invariant} ({len(all_of_it)})")
        lines += [f"    {what}" for what in all_of_it[:_SHOWN]]
    return "\n".join(lines)


def _recoveries(record: Record) -> tuple[dict[str, list[float]], list[float]]:
    """Return the recovery times after each fault alone, and after several at once."""
    alone: dict[str, list[float]] = defaultdict(list)
    mixed = []
    for recovery in record.recoveries:
        if len(recovery.faults) == 1:
            alone[recovery.faults[0]].append(recovery.seconds)
        else:
            mixed.append(recovery.seconds)
    return alone, mixed


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
