"""The programs with one part broken on purpose, to see the harness find it: `… NAME worker relay`."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any
from uuid import UUID

import msgspec
from aiosmtplib import SMTP
from msgspec.structs import replace

from service import __main__ as service
from service import json_faults
from service.api.controllers import requests
from worker import __main__ as worker
from worker import retention
from worker.consumers import incoming
from worker.mail import ledger, postman, smtp
from worker.relay import pointers
from worker.relay.publisher import Publisher, PublishResult


def settle_unconfirmed() -> None:
    """Treat every event that was written to the connection as confirmed."""
    publish = Publisher.publish

    async def publish_and_hope(self: Any, window: Sequence[Any], **options: Any) -> PublishResult:
        outcome = await publish(self, window, **options)
        return PublishResult(frozenset(event.event_id for event in window), outage=outcome.outage)

    Publisher.publish = publish_and_hope  # type: ignore[method-assign]


def publish_twice() -> None:
    """Leave every fiftieth confirmed window in the outbox."""
    delete, calls = pointers.delete, count(1)

    async def delete_mostly(*arguments: Any) -> None:
        if next(calls) % 50:
            await delete(*arguments)

    pointers.delete = delete_mostly  # type: ignore[assignment]


def forget_claims() -> None:
    """Claim e-mails that another process is sending."""
    claim = ledger.claim
    forget = "UPDATE email SET claimed_by = NULL, next_attempt_at = created_at WHERE claimed_by <> $1"

    async def claim_all(connection: Any, process_id: UUID, **options: Any) -> Any:
        await connection.execute(f"{forget} AND state = 'pending'", process_id)
        return await claim(connection, process_id, **options)

    ledger.claim = claim_all


def keep_bodies() -> None:
    """Decode every message, however large, and keep it while others arrive."""
    read = incoming.read
    kept: deque[Any] = deque(maxlen=256)

    def read_and_keep(body: bytes) -> Any:
        with suppress(*json_faults.UNREADABLE):
            kept.append(msgspec.json.decode(body))
        return read(body)

    incoming.read = read_and_keep


def trust_clocks() -> None:
    """Compare stored times with this machine's clock, and erase by the APIs' clocks, which are in the ids."""
    claim = ledger.claim

    async def find_oldest(connection: Any, days: Any) -> list[UUID]:
        oldest = UUID(int=int((time.time() - days * 86_400) * 1000) << 80)
        rows = await connection.fetch("SELECT id FROM calculation_request WHERE id < $1 LIMIT 10", oldest)
        return [row["id"] for row in rows]

    async def claim_by_clock(*arguments: Any, **options: Any) -> Any:
        offset = time.monotonic() - time.time()
        claimed, others = await claim(*arguments, **options)
        return [replace(each, added=each.request.created_at.timestamp() + offset) for each in claimed], others

    retention.find_oldest = find_oldest
    ledger.claim = claim_by_clock


_LAST_FIRST = pointers._LOCK.replace("earlier.sequence <", "earlier.sequence >")  # noqa: SLF001
_forgotten: list[SMTP] = []  # The garbage collector would close them.

BREAKAGES: dict[str, Callable[[], Any]] = {
    "settles-unconfirmed": settle_unconfirmed,
    "inverts": partial(setattr, pointers, "_LOCK", _LAST_FIRST),
    "publishes-twice": publish_twice,
    "forgets-claims": forget_claims,
    # Wait for no reply of the mail server after SIGTERM.
    "leaves-at-once": partial(setattr, postman, "_STOPPING_SHARE", 0.0),
    # Store a mail server's words as they come.
    "stores-replies": partial(setattr, smtp, "storable", lambda text: text),
    # Leave every connection to the mail server open.
    "keeps-sessions": partial(setattr, SMTP, "close", lambda self: _forgotten.append(self)),  # noqa: PLW0108
    "keeps-bodies": keep_bodies,
    # Treat every repeat under a key as a new request.
    "forgets-keys": partial(setattr, requests, "parse_key", lambda *_: None),
    "trusts-clocks": trust_clocks,
}


if __name__ == "__main__":
    BREAKAGES[sys.argv.pop(1)]()
    program = service if sys.argv.pop(1) == "service" else worker
    sys.exit(program.main(sys.argv[1:]))
