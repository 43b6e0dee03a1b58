"""The low-water mark passes deleted events, and never an event that may still appear."""

from worker.relay.lanes import LaneMark, Work


def look(*, xmin: int, next_xid: int) -> Work:
    """Return a look at the outbox that saw these transactions."""
    return Work(first_ids=[], due_lanes=[], last_id=0, xmin=xmin, next_xid=next_xid)


def quiet(number: int) -> Work:
    """Return a look at the outbox with no open transaction."""
    return look(xmin=number, next_xid=number)


def test_mark_passes_a_gap_after_three_looks() -> None:
    mark = LaneMark()

    for moment in (100, 101, 102):
        mark.advance(quiet(moment), 7)

    assert mark.low_water == 7


def test_mark_waits_for_a_transaction_that_was_open_after_the_gap_was_seen() -> None:
    mark = LaneMark()
    mark.advance(quiet(100), 7)
    mark.advance(look(xmin=95, next_xid=101), 7)
    mark.advance(look(xmin=95, next_xid=110), 7)
    waiting_at = mark.low_water

    mark.advance(look(xmin=105, next_xid=111), 7)

    assert (waiting_at, mark.low_water) == (0, 7)


def test_mark_does_not_pass_an_event_that_appeared_late() -> None:
    mark = LaneMark()
    mark.advance(quiet(100), 7)
    mark.advance(quiet(101), 7)

    mark.advance(quiet(102), 5)

    assert mark.low_water <= 5


def test_mark_of_an_empty_lane_stops_behind_the_last_id_given_out() -> None:
    mark = LaneMark()

    for moment in range(100, 110):
        mark.advance(quiet(moment), 10)

    assert mark.low_water == 10
