"""The reference consumer detects loss, inversion and repeats, and reports nothing else."""

import json

import pytest

from tests.worker.reference_consumer import ReferenceConsumer


def event(sequence, *, uuid="req_a", event_id=None):
    data = {"uuid": uuid, "sequence": sequence}
    return json.dumps({"id": event_id or f"{uuid}.{sequence}", "data": data}).encode()


@pytest.mark.parametrize(
    ("sequences", "verdicts"),
    [
        ([1, 2, 3], ["new", "new", "new"]),
        ([1, 2, 2, 1, 3], ["new", "new", "repeat", "repeat", "new"]),
        ([1, 3], ["new", "gap"]),
        ([2, 3], ["gap", "new"]),
        ([2, 1], ["gap", "inversion"]),
        ([1, 3, 2, 4], ["new", "gap", "inversion", "new"]),
        ([1, 3, 2, 2], ["new", "gap", "inversion", "repeat"]),
    ],
    ids=str,
)
def test_each_delivery_is_judged(sequences, verdicts):
    consumer = ReferenceConsumer()

    assert [consumer.take(event(sequence)) for sequence in sequences] == verdicts


def test_requests_are_judged_separately():
    consumer = ReferenceConsumer()

    verdicts = [consumer.take(event(number, uuid=uuid)) for number in (1, 2) for uuid in ("req_a", "req_b")]

    assert verdicts == ["new"] * 4


def test_two_events_with_the_same_sequence_are_a_conflict():
    consumer = ReferenceConsumer()

    assert [consumer.take(event(1)), consumer.take(event(1, event_id="other"))] == ["new", "conflict"]
