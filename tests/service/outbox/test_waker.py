"""Few commits carry a NOTIFY: one at a time, and none shortly after another commit."""

import pytest

from service.outbox.waker import RelayWaker
from service.postgres.pool import Pool


class Clock:
    """A clock that the test sets."""

    seconds = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    """A clock at 0."""
    return Clock()


@pytest.fixture
def waker(pool: Pool, clock: Clock) -> RelayWaker:
    """A waker that has noted no commit."""
    return RelayWaker(pool, timeout_seconds=5.0, clock=clock)


def is_lent(waker: RelayWaker) -> bool:
    """Whether a commit that takes no time would carry a NOTIFY."""
    with waker.lend_notify() as lent:
        return lent


def test_commit_carries_no_notify_while_another_does_however_long_it_takes(
    waker: RelayWaker, clock: Clock
) -> None:
    with waker.lend_notify() as first:
        clock.seconds = 10.0
        second = is_lent(waker)

    assert (first, second) == (True, False)


@pytest.mark.parametrize(("took", "quiet"), [(0.001, 0.005), (0.01, 0.04)])
def test_quiet_time_begins_when_the_commit_with_a_notify_ends_and_is_longer_after_a_slow_one(
    waker: RelayWaker, clock: Clock, took: float, quiet: float
) -> None:
    with waker.lend_notify():
        clock.seconds = took

    clock.seconds = took + quiet - 0.0001
    within = is_lent(waker)
    clock.seconds = took + quiet + 0.0001
    assert (within, is_lent(waker)) == (False, True)


def test_quiet_time_begins_again_with_each_other_commit(waker: RelayWaker, clock: Clock) -> None:
    waker.wake()
    clock.seconds = 0.004
    waker.wake()

    clock.seconds = 0.008
    within = is_lent(waker)
    clock.seconds = 0.0091
    assert (within, is_lent(waker)) == (False, True)


def test_commit_that_fails_keeps_no_later_one_from_carrying_a_notify(waker: RelayWaker, clock: Clock) -> None:
    with pytest.raises(ZeroDivisionError), waker.lend_notify():
        raise ZeroDivisionError

    clock.seconds = 0.0051
    assert is_lent(waker)
