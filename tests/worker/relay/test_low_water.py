"""The low-water mark passes deleted events, and never an event that may still appear."""

from worker.relay.lanes import Snapshot
from worker.relay.low_water import LaneMark


def snapshot(number: int) -> Snapshot:
    """Return a snapshot with no open transaction."""
    return Snapshot(xmin=number, next_xid=number)


def test_mark_passes_a_gap_after_three_looks() -> None:
    mark = LaneMark()

    for moment in (100, 101, 102):
        mark.advance(snapshot(moment), 7)

    assert mark.low_water == 7


def test_mark_waits_for_a_transaction_that_was_open_after_the_gap_was_seen() -> None:
    mark = LaneMark()
    mark.advance(snapshot(100), 7)
    mark.advance(Snapshot(xmin=95, next_xid=101), 7)
    mark.advance(Snapshot(xmin=95, next_xid=110), 7)
    waiting_at = mark.low_water

    mark.advance(Snapshot(xmin=105, next_xid=111), 7)

    assert (waiting_at, mark.low_water) == (0, 7)


def test_mark_does_not_pass_an_event_that_appeared_late() -> None:
    mark = LaneMark()
    mark.advance(snapshot(100), 7)
    mark.advance(snapshot(101), 7)

    mark.advance(snapshot(102), 5)

    assert mark.low_water <= 5


def test_mark_of_an_empty_lane_stops_behind_the_last_id_given_out() -> None:
    mark = LaneMark()

    for moment in range(100, 110):
        mark.advance(snapshot(moment), 10)

    assert mark.low_water == 10
