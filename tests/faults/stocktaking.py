"""What is left at the end of a run, in the tables, the queues and the logs, and its figures."""

import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from functools import partial
from statistics import median

from aio_pika.abc import AbstractChannel

from service.identifiers import uuid_of
from service.postgres.pool import Connection
from tests.faults.invariants import repeats, second_emails
from tests.faults.others import AUDITOR, REFUSED_RECIPIENT, TEAM
from tests.faults.records import Record, Stored
from tests.faults.world import World
from tests.harness import queues
from tests.harness.waiting import until
from worker.rabbitmq import topology

# message_not_settled is logged when a connection breaks, too.
_SUSPICIOUS = re.compile(
    "Traceback|Task (exception was never|was destroyed)|Exception in callback|Unhandled"
    r'|"event":"(?!message_not_settled")\w+","level":"(error|critical)"'
)
# Besides the poison rows and what they hold back.
_UNFINISHED = """
    SELECT (SELECT count(*) FROM outbox) - $1 AS outbox,
           (SELECT count(*) FROM email WHERE state = 'pending') AS emails,
           (SELECT count(*) FROM calculation_request WHERE sequence < 3) AS requests
"""
_LINE = "{:34}{:>7}{:>17}{:>9}{:>17}{:>16}"
_MIXED = "(mixed: up to three at once)"
_QUEUES = (topology.NOTIFICATIONS, topology.CALCULATION_RESULTS)


async def drained(world: World, *, seconds: float) -> dict[str, int]:
    """Wait until all work is done, for at most *seconds*; return what is unfinished then.

    Then wait for the last events to reach the auditor, and for poison to reach the dead letters.
    """
    poison, left = len(world.record.poison_rows), dict[str, int]()

    async def is_finished() -> bool:
        row = await world.on_postgres(lambda connection: connection.fetchrow(_UNFINISHED, poison))
        left.update(row or {})
        return not any(left.values())

    finished = await until(is_finished, seconds=seconds, pause_seconds=0.25)
    async with queues.open_channel(world.servers.broker_url) as channel:
        await until(lambda: _nothing_waits(channel, world.record), seconds=seconds, pause_seconds=0.25)
    return {} if finished else left


async def _nothing_waits(channel: AbstractChannel, record: Record) -> bool:
    names = [AUDITOR, TEAM, *(queue.name for queue in _QUEUES)]
    waiting = [await queues.count(channel, name) for name in names]
    dead = [await queues.count(channel, queue.dead_letters) for queue in _QUEUES]
    return not any(waiting) and sum(dead) >= len(record.poison_messages)


async def take_stock(world: World) -> None:
    """Record the rows, the dead letters and the suspicious lines of the logs."""
    await world.on_postgres(partial(_read_tables, world))
    async with queues.open_channel(world.servers.broker_url) as channel:
        world.record.dead_letters = {each async for each in _dead_letters(channel)}
    for worker in world.workers:
        with worker.log.open(errors="replace") as lines:
            suspicious = [f"{worker.name}: {line.strip()[:400]}" for line in lines if is_suspicious(line)]
        world.record.exceptions += suspicious


async def _read_tables(world: World, connection: Connection) -> None:
    record = world.record
    rows = await connection.fetch(
        "SELECT external_id, id, customer_email, calculation_id FROM calculation_request"
    )
    record.stored = [
        Stored(key, uuid_of(id_), email, calculation_id, email.encode().startswith(REFUSED_RECIPIENT))
        for key, id_, email, calculation_id in rows
    ]
    events = await connection.fetch(
        """
        SELECT request_id, type, next_attempt_at IS NOT NULL AS is_held
          FROM outbox
          LEFT JOIN event USING (request_id, sequence)
        """
    )
    record.held = {f"{uuid_of(row['request_id'])} {row['type']}" for row in events if row["is_held"]}
    record.outbox_left = sum(not row["is_held"] for row in events)
    replies = await connection.fetch("SELECT request_id, server_reply FROM email WHERE server_reply <> ''")
    record.secrets_stored = [
        uuid_of(request_id)
        for request_id, reply in replies
        if any(secret in reply for secret in world.mail.quoted)
    ]


async def _dead_letters(channel: AbstractChannel) -> AsyncIterator[str]:
    for queue in _QUEUES:
        dead_letters = await channel.get_queue(queue.dead_letters, ensure=False)
        while (message := await dead_letters.get(no_ack=True, fail=False)) is not None:
            yield f"{queue.name} {message.message_id}"


def is_suspicious(line: str) -> bool:
    """Whether a line of a log shows our own error, or one that nothing handled. Libraries log sentences."""
    return _SUSPICIOUS.search(line) is not None


def table(record: Record) -> str:
    """Return the figures of a run: a line for each fault, and the totals.

    The longest e-mail is the longest time from a create during the fault to the acceptance of its e-mail.
    """
    repeated = Counter(span.name if span else "none" for _, _, span in repeats(record))
    mailed = {acceptance.recipient: acceptance.at for acceptance in reversed(record.acceptances)}
    created = {request.recipient: record.acknowledged.get(request.key) for request in record.stored}
    waits = [(at, mailed[to] - at) for to, at in created.items() if at is not None and to in mailed]
    recoveries: defaultdict[str, list[float]] = defaultdict(list)
    for faults, recovery in record.recoveries:
        recoveries[_MIXED if len(faults) > 1 else faults[0]].append(recovery)
    lines = [_LINE.format("fault", "times", "recovery median", "worst", "events repeated", "longest e-mail")]
    for fault in [*sorted({span.name for span in record.spans}), _MIXED]:
        spans, seconds = [span for span in record.spans if span.name == fault], recoveries[fault]
        during = [wait for at, wait in waits if any(each.began <= at <= each.ended for each in spans)]
        worst = [f"{figure(seconds):.2f} s" if seconds else "" for figure in (median, max)]
        longest = f"{max(during, default=0.0):.1f} s"
        lines.append(_LINE.format(fault, len(spans), *worst, repeated[fault], longest))
    kinds = ("acknowledged", "stored", "answers", "arrivals", "acceptances", "poison_rows", "poison_messages")
    totals = {kind: len(getattr(record, kind)) for kind in kinds}
    totals |= {"repeated events": repeated.total(), "repeated e-mails": len([*second_emails(record)])}
    calls = {call: f"{answers.count(True)} of {len(answers)}" for call, answers in record.calls.items()}
    peaks = {name: round(max(values)) for name, values in record.peaks.items()}
    return "\n".join([*lines, f"{record.seconds:.0f} s: {totals}", f"in floods: answered {calls}, {peaks}"])
