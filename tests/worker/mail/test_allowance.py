"""The rate of e-mails is limited where EMAIL_RATE is set."""

import time

import pytest

from service.postgres.pool import Connection, Pool
from tests.harness.in_process import running
from tests.harness.waiting import eventually
from tests.worker.conftest import open_postman, settings_with
from tests.worker.mail.conftest import all_are, intend_emails
from worker.mail.allowance import Allowance
from worker.settings import WorkerSettings


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    """A clock at 0."""
    return Clock()


def test_no_limit_allows_any_number(clock: Clock) -> None:
    allowance = Allowance(0, clock=clock)
    allowance.use(1000)

    assert (allowance.at_most(100), allowance.wait_seconds) == (100, 0)


def test_emails_of_a_tenth_of_a_second_may_be_sent_at_once_and_later_ones_as_time_passes(
    clock: Clock,
) -> None:
    allowance = Allowance(40, clock=clock)

    assert allowance.at_most(10) == 4
    allowance.use(4)
    assert (allowance.at_most(10), allowance.wait_seconds) == (0, 1 / 40)
    clock.seconds = 0.05
    assert allowance.at_most(10) == 2
    clock.seconds = 60
    assert allowance.at_most(10) == 4


@pytest.mark.parametrize(("per_second", "most"), [(1, 2), (10, 11), (300, 330)])
def test_no_second_has_more_than_a_tenth_more_or_one_more(clock: Clock, per_second: int, most: int) -> None:
    allowance = Allowance(per_second, clock=clock)
    sent = 0

    for milliseconds in range(1000):
        clock.seconds = milliseconds / 1000
        now = allowance.at_most(16)
        allowance.use(now)
        sent += now

    assert per_second <= sent <= most


@pytest.mark.parametrize("per_second", [0, 4])
def test_none_is_sent_in_a_pause(clock: Clock, per_second: int) -> None:
    allowance = Allowance(per_second, clock=clock)

    allowance.pause(1)

    assert (allowance.at_most(10), allowance.wait_seconds) == (0, 1)
    clock.seconds = 0.75
    assert (allowance.at_most(10), allowance.wait_seconds) == (0, 0.25)
    clock.seconds = 1
    assert allowance.at_most(1) == 1
    assert allowance.wait_seconds == 0


def test_less_than_one_a_second_is_possible(clock: Clock) -> None:
    allowance = Allowance(0.1, clock=clock)

    assert allowance.at_most(10) == 1
    allowance.use(1)
    assert (allowance.at_most(10), allowance.wait_seconds) == (0, 10)
    clock.seconds = 10.1
    assert allowance.at_most(10) == 1


async def test_postman_keeps_to_the_rate(
    worker_settings: WorkerSettings, pool: Pool, database: Connection
) -> None:
    await intend_emails(database, pool, 10)

    async with open_postman(settings_with(worker_settings, email_rate=4.0)) as postman:
        began = time.monotonic()
        async with running(postman.run):
            await eventually(lambda: all_are(database, "sent"))

    assert time.monotonic() - began >= (10 - 1) / 4
