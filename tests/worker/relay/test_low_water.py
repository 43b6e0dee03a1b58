"""The low-water marks pass deleted events, and never an event that may still appear."""

import msgspec

from service.outbox.lanes import LANES
from worker.relay.work import LaneMarks, Work


def look(first_id, *, xmin, next_xid):
    """Return a look at the outbox that saw these transactions, and this first event in every lane."""
    return Work(first_ids=[first_id] * LANES, due_lanes=[], last_id=9, xmin=xmin, next_xid=next_xid)


def quiet(first_id, number):
    """Return a look at the outbox with no open transaction."""
    return look(first_id, xmin=number, next_xid=number)


def low_water(*looks: Work) -> int:
    marks = LaneMarks()
    for each in looks:
        marks.note(each)
    (mark,) = set(marks.low_water)
    return mark


def test_mark_passes_a_gap_after_three_looks():
    looks = [quiet(7, moment) for moment in (100, 101, 102)]

    assert (low_water(*looks[:2]), low_water(*looks)) == (0, 7)


def test_mark_waits_for_a_transaction_that_was_open_after_the_gap_was_seen():
    looks = [quiet(7, 100), look(7, xmin=95, next_xid=101), look(7, xmin=95, next_xid=110)]

    assert low_water(*looks) == 0
    assert low_water(*looks, look(7, xmin=105, next_xid=111)) == 7


def test_mark_does_not_pass_an_event_that_appeared_late():
    assert low_water(quiet(7, 100), quiet(7, 101), quiet(5, 102)) == 5


def test_marks_are_forgotten_when_ids_are_given_out_again():
    passed = [quiet(None, moment) for moment in range(100, 103)]
    set_back = msgspec.structs.replace(quiet(None, 103), last_id=5)

    assert low_water(*passed, set_back) == 0


def test_mark_of_an_empty_lane_stops_behind_the_last_id_given_out():
    assert low_water(*(quiet(None, moment) for moment in range(100, 110))) == 10
