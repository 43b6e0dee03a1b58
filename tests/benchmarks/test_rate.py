"""A measurement of nothing is an error."""

import pytest

from deploy.local.errors import LocalStackError
from tests.benchmarks.comparison import P50
from tests.benchmarks.rate import Waits


async def test_event_that_does_not_arrive_is_an_error():
    waits = Waits()
    with pytest.raises(LocalStackError, match="Of 0 events, 0 arrived"):
        await waits.complete(seconds=0.0)

    waits.began["req_1"] = 0.0
    with pytest.raises(LocalStackError, match="Of 1 events, 0 arrived"):
        await waits.complete(seconds=0.0)
    waits.end("req_1")
    await waits.complete(seconds=0.0)
    assert waits.figures()[P50] > 0
