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


def test_emails_of_a_second_may_be_sent_at_once_and_later_ones_as_time_passes(clock: Clock) -> None:
    allowance = Allowance(4, clock=clock)

    assert allowance.at_most(10) == 4
    allowance.use(4)
    assert (allowance.at_most(10), allowance.wait_seconds) == (0, 0.25)
    clock.seconds = 0.5
    assert allowance.at_most(10) == 2
    clock.seconds = 60
    assert allowance.at_most(10) == 4


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

    assert time.monotonic() - began >= (10 - 4) / 4
