"""The reference consumer detects loss, inversion and repeats, and reports nothing else."""

import json

import pytest

from tests.worker.reference_consumer import ReferenceConsumer


@pytest.mark.parametrize(
    ("deliveries", "verdicts"),
    [
        ("a1 a2 a3", "new new new"),
        ("a1 a2 a2 a1 a3", "new new repeat repeat new"),
        ("a1 a3", "new gap"),
        ("a2 a3", "gap new"),
        ("a2 a1", "gap inversion"),
        ("a1 a3 a2 a4", "new gap inversion new"),
        ("a1 a3 a2 a2", "new gap inversion repeat"),
        ("a1 b1 a2 b2", "new new new new"),
        ("a1 a1-again-with-another-id", "new conflict"),
        ("a2 a1-redelivered a3", "gap late new"),
        ("a1 a2-redelivered", "new new"),
    ],
)
def test_each_delivery_is_judged_by_those_of_its_request_before(deliveries, verdicts):
    consumer = ReferenceConsumer()

    judged = [
        consumer.take(
            json.dumps({"id": each, "data": {"uuid": each[0], "sequence": int(each[1])}}).encode(),
            redelivered=each.endswith("-redelivered"),
        )
        for each in deliveries.split()
    ]

    assert judged == verdicts.split()
