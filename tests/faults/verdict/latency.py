"""The latency from commit to auditor, and when it is normal again after a fault."""

import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import takewhile

from tests.faults.verdict.records import CREATED, Record

BAR_SECONDS = 1.0
_IN_A_ROW = 16
_EARLY_SECONDS = 30.0  # an event may come that long before its create is acknowledged: repeats take 20


def recovered_after(record: Record, end: float) -> float | None:
    """Return when, after *end*, latencies fell below the bar for good; None while they have not.

    So many in a row must show it that each relay has probably published some.
    """
    now = time.monotonic()
    recent = takewhile(lambda arrival: arrival.at > end - _EARLY_SECONDS, reversed(record.arrivals))
    arrived = {arrival.key: arrival.at for arrival in recent if arrival.type == CREATED}
    commits = list(takewhile(lambda item: item[1].at >= end, reversed(record.acknowledged.items())))
    began: float | None = None
    in_time = 0
    for key, commit in reversed(commits):
        if arrived.get(key, now) - commit.at >= BAR_SECONDS:
            began = None
            in_time = 0
        elif key not in arrived:
            return None  # It is too early to know.
        else:
            began = commit.at if began is None else began
            in_time += 1
        if in_time == _IN_A_ROW:
            return began
    return None


def email_waits(record: Record) -> Mapping[str, float]:
    """Return by fault the longest time from a create during it to the first acceptance of its e-mail."""
    mailed = {acceptance.recipient: acceptance.at for acceptance in reversed(record.acceptances)}
    waits: defaultdict[str, float] = defaultdict(float)
    for request in record.stored:
        commit, at = record.acknowledged.get(request.key), mailed.get(request.recipient)
        if commit is not None and at is not None:
            for span in record.spans:
                if span.began <= commit.at <= span.ended:
                    waits[span.fault] = max(waits[span.fault], at - commit.at)
    return waits
