"""The programs with one part broken on purpose, to see the harness find it: `… NAME worker relay`."""

import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from service import __main__ as service
from service.api import idempotency_key_header
from service.outbox import events
from worker import __main__ as worker
from worker.mail import postman
from worker.relay import loop, outbox_tables
from worker.relay.outbox_tables import OutboxRow

_FORGET_EVERY = 50


def invert() -> None:
    """Publish the last event of a request first."""

    def last_of_each_request(rows: Sequence[OutboxRow]) -> list[OutboxRow]:
        last = {row.request_id: row for row in rows}
        return [row for row in rows if last[row.request_id] is row]

    loop._first_of_each_request = last_of_each_request  # noqa: SLF001


def publish_twice() -> None:
    """Leave every fiftieth confirmed window in the outbox."""
    delete = outbox_tables.delete
    calls = count(1)

    async def delete_mostly(*arguments: Any) -> None:
        if next(calls) % _FORGET_EVERY:
            await delete(*arguments)

    outbox_tables.delete = delete_mostly  # type: ignore[assignment]


def lose_returned() -> None:
    """Treat a returned message as delivered."""
    events.MUST_BE_ROUTED = frozenset()


def leave_at_once() -> None:
    """Wait for no reply of the mail server after SIGTERM."""
    postman._STOPPING_SHARE = 0.0  # noqa: SLF001


def forget_keys() -> None:
    """Treat every repeat under a key as a new request."""
    idempotency_key_header.parse_key = lambda values: None  # noqa: ARG005


BREAKAGES: dict[str, Callable[[], Any]] = {
    "inverts": invert,
    "publishes-twice": publish_twice,
    "loses-returned": lose_returned,
    "leaves-at-once": leave_at_once,
    "forgets-keys": forget_keys,
}
_PROGRAMS = {"service": service.main, "worker": worker.main}


if __name__ == "__main__":
    BREAKAGES[sys.argv.pop(1)]()
    sys.exit(_PROGRAMS[sys.argv.pop(1)](sys.argv[1:]))
