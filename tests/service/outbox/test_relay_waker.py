"""Few commits carry a NOTIFY: one at a time, and none shortly after another commit."""

import time

import pytest

from service.outbox.lanes import RelayWaker


@pytest.fixture
def waker(pool):
    """A waker that has noted no commit."""
    return RelayWaker(pool, seconds=5.0)


def may_notify(waker: RelayWaker) -> bool:
    """Whether a commit that takes no time would carry a NOTIFY."""
    with waker.around_commit() as may:
        return may


def test_commit_carries_no_notify_while_another_does(waker):
    with waker.around_commit() as first:
        second = may_notify(waker)

    assert (first, second) == (True, False)


def test_quiet_time_after_a_commit_with_a_notify_is_four_times_as_long_as_that_took(waker):
    with waker.around_commit():
        time.sleep(0.1)

    within = may_notify(waker)
    time.sleep(0.45)
    assert (within, may_notify(waker)) == (False, True)


def test_quiet_time_begins_again_with_each_other_commit(waker):
    waker.wake()
    within = may_notify(waker)
    time.sleep(0.01)
    assert (within, may_notify(waker)) == (False, True)


def test_commit_that_fails_keeps_no_later_one_from_carrying_a_notify(waker):
    with pytest.raises(ZeroDivisionError), waker.around_commit():
        raise ZeroDivisionError

    time.sleep(0.01)
    assert may_notify(waker)
