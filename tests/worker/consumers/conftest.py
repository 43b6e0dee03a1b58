"""A consumer whose handler the test controls."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with, take
from worker.batches import Failures, TryAgain
from worker.consumers.consumer import Consumer
from worker.consumers.incoming import Incoming
from worker.rabbitmq.topology import NOTIFICATIONS, Queue


class Refused(Exception):
    """This number is refused."""


class Work:
    """A handler that waits and fails as the test says, refuses 13, and fails with 0 and, as aiormq may, 7."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.done: list[int] = []
        self.error: Exception | None = None
        self.locked: set[int] = set()
        self.going_on = asyncio.Event()
        self.going_on.set()

    @staticmethod
    def decode(message: Incoming, _: str) -> int:
        """Read a number. Raises Malformed."""
        return message.to(int)

    async def record(self, _: object, numbers: Sequence[int]) -> Failures:
        """Wait for `going_on`, then return an outcome for each number, or raise `error`."""
        self.batches.append(list(numbers))
        await self.going_on.wait()
        if self.error is not None:
            raise self.error
        if 0 in numbers:
            raise ZeroDivisionError
        if 7 in numbers:
            raise asyncio.CancelledError
        failures = {13: Refused(), **{number: TryAgain("the row is locked") for number in self.locked}}
        self.done += [number for number in numbers if number not in failures]
        return [failures.get(number) for number in numbers]

    @property
    def started(self) -> list[int]:
        """The numbers of all batches, in order."""
        return [number for batch in self.batches for number in batch]


@pytest.fixture
def work():
    return Work()


@pytest.fixture
def consumer_with(worker_settings, pool, work):
    parts = {"decode": work.decode, "record": work.record, "committed": lambda: None, "refusals": ()}

    def make(pool=pool, **changes: Any):
        return Consumer(settings_with(worker_settings, **changes), NOTIFICATIONS, pool, **parts)

    return make


@pytest.fixture
def consumer(consumer_with):
    return consumer_with()


async def dead_letter(channel: AbstractChannel, queue: Queue = NOTIFICATIONS) -> AbstractIncomingMessage:
    dead_letters = await channel.get_queue(queue.dead_letters)
    message = await eventually(lambda: take(dead_letters))
    assert isinstance(message, AbstractIncomingMessage)
    return message
