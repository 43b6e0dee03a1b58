"""Measures the relay on a full outbox, an old snapshot, poison, and idle; and scrapes: `tests.faults.drain`.

Postgres and RabbitMQ are private nodes on this machine. Events go to a quorum queue of bounded length.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvloop
from prometheus_client import REGISTRY

from deploy.local.machine.folders import Place, working_folder
from service.identifiers import new_request_id
from service.outbox import lanes as outbox_lanes
from service.postgres.pool import Connection
from service.telemetry import metrics
from tests.faults.draining import TYPE, PassLog, drain, fill, running_worker, watch
from tests.faults.plan import LOCAL
from tests.faults.world.world import connect
from tests.harness import databases, queues
from tests.harness.servers import Servers, private_servers
from tests.harness.waiting import until
from worker import gauges
from worker.rabbitmq import topology
from worker.relay.backlog import read_sizes
from worker.relay.lanes import find_work

_SINK = "harness.sink"
_SMALL, _SMALL_TIMES = 10_000, 3
_PROBES = 20
_SCRAPE_SECONDS = 5.0


async def _measure_sizes(folder: Path, servers: Servers, rows: int) -> dict[str, Any]:
    """Drain *rows* events in tenths, and between them a small outbox in another database.

    One worker at a time, in turn, so that other load on the machine affects both alike.
    """
    full_url, small_url = await _another_database(servers.postgres.url, "crowded"), servers.postgres.url
    full, small = await connect(full_url), await connect(small_url)
    await fill(full, rows)
    of_full, of_small = [], []
    for tenth in range(10):
        async with running_worker(folder, full_url, servers.broker.url, "relay") as worker:
            of_full.append(await watch(PassLog(worker), rows // 10 if tenth < 9 else await _pending(full)))
        async with running_worker(folder, small_url, servers.broker.url, "relay") as worker:
            log = PassLog(worker)
            of_small += [await drain(small, log, _SMALL) for _ in range(_SMALL_TIMES)]
    for connection in (full, small):
        await connection.close()
    full_rate = median(each.rows_per_second for each in of_full)
    small_rate = median(each.rows_per_second for each in of_small)
    return {
        f"rows_per_second_at_{_SMALL}": round(small_rate),
        f"rows_per_second_at_{rows}": round(full_rate),
        "ratio": round(full_rate / small_rate, 3),
        "batch_milliseconds_by_tenth": [round(each.batch_seconds * 1000, 1) for each in of_full],
        "largest_rss_megabytes": round(max(each.largest_rss_megabytes for each in of_full), 1),
    }


async def _pending(connection: Connection) -> int:
    count: int = await connection.fetchval("SELECT count(*) FROM outbox")
    return count


async def _measure_snapshot(folder: Path, servers: Servers, rows: int) -> dict[str, Any]:
    """Drain *rows* events in each of two databases, in turn. In one of them a snapshot stays open.

    Vacuum is held back by snapshots of its own database only. In turn, so that other load on the machine
    affects both alike.
    """
    held_url = await _another_database(servers.postgres.url, "held")
    held, free = await connect(held_url), await connect(servers.postgres.url)
    holder = await connect(held_url)
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox")
    rates: list[tuple[float, float]] = []
    async with (
        running_worker(folder, held_url, servers.broker.url, "relay") as held_worker,
        running_worker(folder, servers.postgres.url, servers.broker.url, "relay") as free_worker,
    ):
        held_log, free_log = PassLog(held_worker), PassLog(free_worker)
        for _ in range(rows // _SMALL):
            held_drain = await drain(held, held_log, _SMALL)
            free_drain = await drain(free, free_log, _SMALL)
            rates.append((held_drain.rows_per_second, free_drain.rows_per_second))
    for connection in (holder, held, free):
        await connection.close()
    ratios = [held_rate / free_rate for held_rate, free_rate in rates]
    third = max(1, len(ratios) // 3)
    return {
        "rows_per_second_free": round(median(free_rate for _, free_rate in rates)),
        "rows_per_second_with_snapshot": round(median(held_rate for held_rate, _ in rates)),
        "ratio": round(median(ratios), 3),
        "ratio_of_last_third": round(median(ratios[-third:]), 3),
    }


async def _another_database(url: str, name: str) -> str:
    """Create a database with the schema on the server of *url*; return its URL."""
    administrator = await connect(url)
    await databases.create(administrator, name)
    await administrator.close()
    another = databases.url_of(url, name)
    connection = await connect(another)
    await databases.prepare(connection)
    await connection.close()
    return another


async def _measure_poison(folder: Path, servers: Servers) -> dict[str, Any]:
    """Time how long an event takes to leave its lane: alone, and behind a poison row stored with it."""
    connection = await connect(servers.postgres.url)
    seconds: dict[str, list[float]] = {"alone": [], "behind_poison": []}
    async with running_worker(folder, servers.postgres.url, servers.broker.url, "relay"):
        for _ in range(_PROBES):
            for name, times in seconds.items():
                request_id = new_request_id()
                async with connection.transaction():
                    if name == "behind_poison":
                        poison = new_request_id()
                        while outbox_lanes.lane_of(poison) != outbox_lanes.lane_of(request_id):
                            poison = new_request_id()
                        await _insert(connection, poison, "request." + "x" * 300)
                    await _insert(connection, request_id, TYPE)
                times.append(await _seconds_until_gone(connection, request_id))
    parked = await connection.fetchval("SELECT count(*) FROM outbox_held")
    await connection.execute("DELETE FROM outbox_held")
    await connection.close()
    return {
        "milliseconds_alone": round(median(seconds["alone"]) * 1000, 1),
        "milliseconds_behind_poison": round(median(seconds["behind_poison"]) * 1000, 1),
        "poison_rows_held": parked,
    }


async def _insert(connection: Connection, request_id: Any, type_: str) -> None:
    await connection.execute(
        "INSERT INTO outbox (lane, request_id, type, sequence, payload) VALUES ($1, $2, $3, 1, $4)",
        outbox_lanes.lane_of(request_id),
        request_id,
        type_,
        b"{}",
    )


async def _seconds_until_gone(connection: Connection, request_id: Any) -> float:
    began = time.monotonic()
    await outbox_lanes.notify(connection)

    async def is_gone() -> bool:
        query = "SELECT EXISTS (SELECT FROM outbox WHERE request_id = $1)"
        waiting: bool = await connection.fetchval(query, request_id)
        return not waiting

    await until(is_gone, seconds=30.0, pause_seconds=0.001)
    return time.monotonic() - began


async def _measure_idle(folder: Path, servers: Servers, seconds: float) -> dict[str, Any]:
    """Measure what an idle worker with all roles uses, scraped every five seconds."""
    connection = await connect(servers.postgres.url)
    async with running_worker(folder, servers.postgres.url, servers.broker.url) as worker:
        await asyncio.sleep(5.0)  # until it has connected and Postgres has reported the statistics
        cpu, transactions = worker.cpu_seconds(), await _transactions(connection)
        async with httpx.AsyncClient(base_url=worker.base_url) as client:
            for _ in range(round(seconds / _SCRAPE_SECONDS)):
                (await client.get("/metrics")).raise_for_status()
                await asyncio.sleep(_SCRAPE_SECONDS)
        cpu, transactions = worker.cpu_seconds() - cpu, await _transactions(connection) - transactions
        rss = worker.rss_megabytes()
    await connection.close()
    return {
        "percent_of_a_core": round(100 * cpu / seconds, 2),
        "statements_per_second": round(transactions / seconds, 2),
        "rss_megabytes": round(rss, 1),
    }


async def _measure_scrape(servers: Servers, rows: int) -> dict[str, Any]:
    """Time the statement behind the outbox gauges: on a full outbox, and on dead rows under an old snapshot.

    A relay that is working knows where the dead rows end. One that has just started does not.
    """
    url = await _another_database(servers.postgres.url, "scraped")
    connection, holder = await connect(url), await connect(url)
    nowhere = [0] * outbox_lanes.LANES
    await fill(connection, rows)
    await connection.execute("SELECT pg_stat_force_next_flush()")
    full, pending = await _time_scrape(connection, nowhere)
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox")
    await connection.execute("DELETE FROM outbox WHERE id <= $1", rows - 1000, timeout=600.0)
    lanes = await connection.fetch("SELECT min(id) AS first FROM outbox GROUP BY lane ORDER BY lane")
    behind_dead, left = await _time_scrape(connection, [lane["first"] for lane in lanes])
    over_dead, _ = await _time_scrape(connection, nowhere)
    began = time.perf_counter()
    await find_work(connection, nowhere)
    poll_over_dead = round((time.perf_counter() - began) * 1000, 1)
    for each in (connection, holder):
        await each.close()
    began = time.perf_counter()
    metrics.exposition([REGISTRY])
    return {
        f"milliseconds_at_{rows}": full,
        "pending_told": pending,
        "milliseconds_behind_dead_rows": behind_dead,
        "pending_told_behind_dead_rows": left,
        "milliseconds_over_dead_rows": over_dead,
        "milliseconds_of_the_relays_poll_over_dead_rows": poll_over_dead,
        "milliseconds_of_exposition": round((time.perf_counter() - began) * 1000, 1),
    }


async def _time_scrape(connection: Connection, marks: list[int]) -> tuple[float, int]:
    """Return the median time in milliseconds, and the number of pending events."""
    times = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        sizes = await read_sizes(connection, marks, limit=gauges.COUNT_LIMIT)
        times.append(time.perf_counter() - began)
    return round(median(times) * 1000, 1), sizes.pending


async def _transactions(connection: Connection) -> int:
    """Return how many transactions there have been. When idle, each is one statement."""
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    count: int = await connection.fetchval(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    )
    return count


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out the chosen measurements."""
    place = Place(folder=LOCAL, keep=False, report=print)
    figures: dict[str, Any] = {}
    with working_folder(place, "drain") as folder, private_servers(place) as servers:
        connection = await connect(servers.postgres.url)
        await databases.prepare(connection)
        await connection.close()
        async with queues.open_channel(servers.broker.url) as channel:
            await topology.declare(channel)
            sink = await channel.declare_queue(
                _SINK,
                durable=True,
                arguments={"x-queue-type": "quorum", "x-max-length": 10_000, "x-overflow": "drop-head"},
            )
            await sink.bind(topology.REQUESTS, TYPE)
        if "idle" in arguments.only:
            figures["idle"] = await _measure_idle(folder, servers, arguments.idle_seconds)
        if "poison" in arguments.only:
            figures["poison"] = await _measure_poison(folder, servers)
        if "scrape" in arguments.only:
            figures["scrape"] = await _measure_scrape(servers, arguments.rows)
        if "size" in arguments.only:
            figures["size"] = await _measure_sizes(folder, servers, arguments.rows)
        if "snapshot" in arguments.only:
            figures["snapshot"] = await _measure_snapshot(folder, servers, arguments.events)
    return figures


def main() -> int:
    """Measure, and print the figures as a table; write them as JSON if asked to."""
    every = ("idle", "poison", "scrape", "size", "snapshot")
    parser = argparse.ArgumentParser(prog="python -m tests.faults.drain", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="in the full outbox")
    parser.add_argument("--events", type=int, default=300_000, help="to drain while a snapshot is open")
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = uvloop.run(measure(arguments))
    for measurement, values in figures.items():
        for name, value in values.items():
            print(f"{measurement:10} {name:48} {value}")  # noqa: T201 - a command prints
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
