"""The mark of a lane: it saves scanning what is gone, and never passes what may still appear."""

from worker.relay.lanes import Snapshot
from worker.relay.low_water import LaneMark


def snapshot(number: int) -> Snapshot:
    """Return the snapshot of a moment at which no transaction was under way."""
    return Snapshot(xmin=number, next_xid=number)


def test_mark_passes_what_is_gone_after_three_passes() -> None:
    mark = LaneMark()

    for moment in (100, 101, 102):
        mark.advance(snapshot(moment), 7)

    assert mark.low_water == 7


def test_mark_waits_for_a_transaction_that_was_under_way_after_the_gap_was_seen() -> None:
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


def test_mark_of_an_empty_lane_comes_to_rest_behind_the_last_id_given_out() -> None:
    mark = LaneMark()

    for moment in range(100, 110):
        mark.advance(snapshot(moment), 10)

    assert mark.low_water == 10
