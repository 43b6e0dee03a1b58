"""The worker as a process: its command line, its start and its end."""

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from aio_pika.abc import AbstractChannel

from deploy.local.machine.folders import CHECKOUT
from service.calculation_requests.model import CalculationRequest
from service.postgres.pool import Connection
from tests.harness.mail_server import MailServer
from tests.harness.waiting import eventually
from tests.worker.conftest import publish, store
from worker.rabbitmq.topology import CALCULATION_RESULTS
from worker.settings import WorkerSettings


def environment_of(settings: WorkerSettings, port: int, **changes: str) -> dict[str, str]:
    """Return the environment with these settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_URL")}
    return {
        **inherited,
        "DATABASE_URL": settings.database_url,
        "APP_URL": settings.app_url,
        "REQUEST_SECRET_KEYS": settings.request_secret_keys,
        "AMQP_URL": settings.amqp_url,
        "SMTP_URL": settings.smtp_url,
        "MAIL_FROM": settings.mail_from,
        "HEALTH_PORT": str(port),
        **changes,
    }


async def start(*arguments: str, environment: Mapping[str, str]) -> Process:
    """Start `python -m worker`."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "worker", *arguments, cwd=CHECKOUT, env=environment, stdout=PIPE, stderr=PIPE
    )


async def finish(process: Process) -> tuple[int | None, str, str]:
    """Wait for the end of a process. Returns its exit status, stdout and stderr."""
    async with asyncio.timeout(30):
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


@asynccontextmanager
async def started(*roles: str, environment: Mapping[str, str]) -> AsyncIterator[Process]:
    """Run the worker, and kill it if it still runs after the block."""
    process = await start(*roles, environment=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def readiness(port: int) -> dict[str, str]:
    """Return the state of each check from /readyz, or nothing while the worker does not answer."""
    async with httpx.AsyncClient() as client:
        try:
            response = await client.get(f"http://127.0.0.1:{port}/readyz")
        except httpx.TransportError:
            return {}
    answer: dict[str, str] = response.json()
    return answer


async def is_ready(port: int, checks: set[str]) -> bool:
    """Whether these checks, and no others, exist and pass."""
    return await readiness(port) == dict.fromkeys(checks, "ok")


async def test_unknown_role_is_named_and_ends_the_process() -> None:
    status, output, errors = await finish(await start("relay", "nonsense", environment=os.environ))

    assert (status, output) == (2, "")
    assert "no such role: nonsense" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AMQP_URL", "http://user:hunter2@127.0.0.1"),
        ("MAIL_FROM", "hunter2"),
        ("REQUEST_SECRET_KEYS", "current:hunter2"),
    ],
)
async def test_bad_setting_is_named_in_one_line_without_its_value(
    worker_settings: WorkerSettings, unused_tcp_port: int, *, name: str, value: str
) -> None:
    environment = environment_of(worker_settings, unused_tcp_port, **{name: value})

    status, output, errors = await finish(await start(environment=environment))

    assert status == 1
    assert errors.startswith(f"{name}: ")
    assert len(errors.splitlines()) == 1
    assert "hunter2" not in output + errors


async def test_worker_runs_all_roles_and_stops_on_sigterm(
    worker_settings: WorkerSettings,
    unused_tcp_port: int,
    channel: AbstractChannel,
    database: Connection,
    stored_request: CalculationRequest,
) -> None:
    environment = environment_of(worker_settings, unused_tcp_port)
    result = {"request_uuid": stored_request.uuid, "calculation_id": "calc-1"}

    async with started(environment=environment) as process:
        checks = {"postgres", "relay", "notifications", "calculations"}
        await eventually(lambda: is_ready(unused_tcp_port, checks), seconds=30)
        await publish(channel, CALCULATION_RESULTS, msgspec.json.encode(result))
        await eventually(lambda: is_done(database))
        process.send_signal(signal.SIGTERM)
        status, output, errors = await finish(process)

    assert (status, errors) == (0, "")
    logged = [msgspec.json.decode(line)["event"] for line in output.splitlines()]
    assert logged[-1] == "worker_stopped"
    assert worker_settings.request_secret_keys not in output
    assert stored_request.customer_email not in output


async def is_done(database: Connection) -> bool:
    """Whether the e-mail is sent, the calculation recorded and every event published."""
    return bool(
        await database.fetchval(
            """
            SELECT count(*) > 0
              FROM email, calculation_request
             WHERE state = 'sent'
               AND calculation_id = 'calc-1'
               AND sequence = 3
               AND NOT EXISTS (SELECT FROM outbox)
            """
        )
    )


async def test_unexpected_failure_ends_no_role(
    worker_settings: WorkerSettings, unused_tcp_port: int, channel: AbstractChannel, database: Connection
) -> None:
    environment = environment_of(worker_settings, unused_tcp_port)
    checks = {"postgres", "relay", "notifications", "calculations"}

    async with started(environment=environment) as process:
        await eventually(lambda: is_ready(unused_tcp_port, checks), seconds=30)
        await database.execute("ALTER TABLE email RENAME TO email_elsewhere")
        await eventually(lambda: has_counted_failure(unused_tcp_port, "emails"))
        request = await store(database)
        await eventually(lambda: is_relayed(database))
        await database.execute("ALTER TABLE email_elsewhere RENAME TO email")
        result = {"request_uuid": request.uuid, "calculation_id": "calc-1"}
        await publish(channel, CALCULATION_RESULTS, msgspec.json.encode(result))
        await eventually(lambda: is_done(database))
        process.send_signal(signal.SIGTERM)
        status, _, errors = await finish(process)

    assert (status, errors) == (0, "")


async def has_counted_failure(port: int, part: str) -> bool:
    """Whether the worker has counted a failure of this part."""
    async with httpx.AsyncClient() as client:
        response = await client.get(f"http://127.0.0.1:{port}/metrics")
    series = f'background_failures_total{{work="{part}"}}'
    return any(line.startswith(series) and not line.endswith(" 0.0") for line in response.text.splitlines())


async def test_worker_with_one_role_runs_no_other(
    worker_settings: WorkerSettings,
    unused_tcp_port: int,
    mail_server: MailServer,
    database: Connection,
    stored_request: CalculationRequest,
) -> None:
    environment = environment_of(worker_settings, unused_tcp_port)

    async with started("relay", environment=environment) as process:
        await eventually(lambda: is_ready(unused_tcp_port, {"postgres", "relay"}), seconds=30)
        await eventually(lambda: is_relayed(database))
        process.send_signal(signal.SIGINT)
        status, _, errors = await finish(process)

    assert (status, errors) == (0, "")
    assert mail_server.accepted == []
    assert await database.fetchval("SELECT sequence FROM calculation_request") == stored_request.sequence


async def is_relayed(database: Connection) -> bool:
    """Whether the outbox is empty."""
    return not await database.fetchval("SELECT count(*) FROM outbox")


async def test_worker_starts_without_broker_and_is_not_ready(
    worker_settings: WorkerSettings, unused_tcp_port_factory: Callable[[], int]
) -> None:
    port, nowhere = unused_tcp_port_factory(), unused_tcp_port_factory()
    environment = environment_of(worker_settings, port, AMQP_URL=f"amqp://guest:guest@127.0.0.1:{nowhere}/")

    async with started(environment=environment) as process:
        answer = await eventually(lambda: readiness(port), seconds=30)
        process.send_signal(signal.SIGTERM)
        status, output, errors = await finish(process)

    lines = [json.loads(line) for line in output.splitlines()]
    assert {"relay_paused", "consumer_paused"} <= {line["event"] for line in lines}
    assert {line["level"] for line in lines} == {"info", "warning"}, "an outage is not an error of the worker"
    assert answer == {
        "postgres": "ok",
        "relay": "not connected to RabbitMQ",
        "notifications": "not reading notifications",
        "calculations": "not reading calculation-results",
    }
    assert (status, errors) == (0, "")


async def test_worker_waits_for_the_schema(
    worker_settings: WorkerSettings, unused_tcp_port: int, postgres_server: str
) -> None:
    environment = environment_of(worker_settings, unused_tcp_port, DATABASE_URL=postgres_server)

    async with started("relay", environment=environment) as process:
        answer = await eventually(lambda: readiness(unused_tcp_port), seconds=30)
        process.send_signal(signal.SIGTERM)
        status, _, errors = await finish(process)

    assert answer["postgres"].startswith("The database schema is older")
    assert (status, errors) == (0, "")


async def test_port_in_use_is_reported_in_one_line(worker_settings: WorkerSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        status, output, errors = await finish(await start(environment=environment_of(worker_settings, port)))

    assert (status, output) == (1, "")
    assert errors == f"cannot listen on 127.0.0.1:{port} (Address already in use)\n"
