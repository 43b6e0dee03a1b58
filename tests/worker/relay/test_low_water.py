"""The low-water marks pass deleted events, and never an event that may still appear."""

import pytest

from service.outbox.lanes import LANES
from worker.relay.work import LaneMarks, Work, find_work


def look(first_id: int | None, *, xmin: int, next_xid: int, last_id: int = 9) -> Work:
    """Return a look at the outbox that saw these transactions, and this first event in every lane."""
    return Work(first_ids=[first_id] * LANES, due_lanes=[], last_id=last_id, xmin=xmin, next_xid=next_xid)


def quiet(first_id: int | None, *numbers: int) -> list[Work]:
    """Return looks at the outbox with no open transaction."""
    return [look(first_id, xmin=number, next_xid=number) for number in numbers]


WITH_AN_OPEN_ONE = [*quiet(7, 100), look(7, xmin=95, next_xid=101), look(7, xmin=95, next_xid=110)]

LOOKS = {
    "a gap is not passed after two looks": (quiet(7, 100, 101), 0),
    "a gap is passed after three looks": (quiet(7, 100, 101, 102), 7),
    "a transaction that was open after the gap was seen is awaited": (WITH_AN_OPEN_ONE, 0),
    "the gap is passed once it has ended": ([*WITH_AN_OPEN_ONE, look(7, xmin=105, next_xid=111)], 7),
    "an event that appeared late is not passed": (quiet(7, 100, 101) + quiet(5, 102), 5),
    "an empty lane is passed up to the last id given out": (quiet(None, *range(100, 110)), 10),
    "marks are forgotten when ids are given out again": (
        [*quiet(None, 100, 101, 102), look(None, xmin=103, next_xid=103, last_id=5)],
        0,
    ),
}


@pytest.mark.parametrize(("looks", "mark"), LOOKS.values(), ids=LOOKS)
def test_mark_is_where_no_earlier_event_can_appear(looks, mark):
    marks = LaneMarks()

    for each in looks:
        marks.note(each)

    assert marks.low_water == [mark] * LANES


async def test_no_id_counts_as_given_out_in_a_new_database(database):
    assert (await find_work(database, [0] * LANES)).last_id == 0
