"""A worker that drains an outbox, timed by its log."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from deploy.local.errors import LocalStackError
from service.identifiers import new_request_id, uuid_of
from service.outbox import events
from service.outbox.events import RequestCalculated
from service.postgres.pool import Connection
from tests.harness.examples import SECRET_KEYS
from tests.harness.processes import Process, worker_process
from tests.harness.waiting import until
from worker.settings import WorkerSettings

TYPE = RequestCalculated.type

_DRAIN_SECONDS = 3_600.0
_START_SECONDS = 30.0


class Pass(msgspec.Struct, frozen=True):
    """One batch that left the outbox, from the relay's log."""

    at: float
    events: int


class Drain(msgspec.Struct, frozen=True):
    """How fast events left the outbox."""

    rows_per_second: float
    batch_seconds: float  # median
    largest_rss_megabytes: float


class PassLog:
    """Reads the relay's passes from the log of its process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._read = 0

    def passes(self) -> list[Pass]:
        """Return the passes since the last call."""
        with self.process.log.open("rb") as log:
            log.seek(self._read)
            written = log.read()
        whole = written[: written.rfind(b"\n") + 1]
        self._read += len(whole)
        parsed = (json.loads(line) for line in whole.splitlines() if b"outbox_relayed" in line)
        return [
            Pass(datetime.fromisoformat(line["timestamp"]).timestamp(), line["events"]) for line in parsed
        ]


@asynccontextmanager
async def running_worker(
    folder: Path, database_url: str, amqp_url: str, *roles: str
) -> AsyncIterator[Process]:
    settings = WorkerSettings(
        database_url=database_url,
        amqp_url=amqp_url,
        app_url="https://app.example.com",
        request_secret_keys=SECRET_KEYS,
        smtp_url="smtp://127.0.0.1:9",
        mail_from="calculations@service.example.com",
    )
    worker = worker_process(settings, folder, *roles)
    worker.start()
    try:
        if not await until(lambda: "worker_started" in worker.output, seconds=_START_SECONDS):
            raise LocalStackError(worker.running.describe("The worker does not start."))
        yield worker
    finally:
        await asyncio.to_thread(worker.running.stop)


async def fill(connection: Connection, rows: int) -> None:
    """Put events of *rows* different requests into the outbox, in one transaction."""
    example = RequestCalculated(
        uuid=uuid_of(new_request_id()),
        tenant="acme-conveyancing",
        request_type="SDLT_CALCULATION",
        property_value=300_000,
        calculation_fee_exempt=False,
        external_id="case-1234567",
        sequence=1,
        calculation_id="calculation-1234567",
    )
    payload = events.encode(example, time=datetime.now().astimezone(), traceparent=None)
    await connection.execute(
        """
        INSERT INTO outbox (lane, request_id, type, sequence, payload)
        SELECT ('x' || right(id::text, 1))::bit(4)::int, id, $2, 1, $3
          FROM (SELECT gen_random_uuid() AS id
                  FROM generate_series(1, $1)) AS request
        """,
        rows,
        TYPE,
        payload,
        timeout=600.0,
    )


async def drain(connection: Connection, log: PassLog, rows: int) -> Drain:
    """Fill the outbox, and watch it drain."""
    log.passes()
    await fill(connection, rows)
    return await watch(log, rows)


async def watch(log: PassLog, rows: int) -> Drain:
    """Wait until *rows* events have left the outbox."""
    passes: list[Pass] = []
    largest = 0.0

    def is_drained() -> bool:
        # From its log: counting in Postgres would step over the dead rows at every poll.
        nonlocal largest
        largest = max(largest, log.process.rss_megabytes())
        passes.extend(log.passes())
        return sum(each.events for each in passes) >= rows

    if not await until(is_drained, seconds=_DRAIN_SECONDS, pause_seconds=0.1):
        raise LocalStackError("The outbox does not drain.")
    return Drain(
        rows_per_second=sum(each.events for each in passes[1:]) / (passes[-1].at - passes[0].at),
        batch_seconds=median(later.at - earlier.at for earlier, later in pairwise(passes)),
        largest_rss_megabytes=largest,
    )
