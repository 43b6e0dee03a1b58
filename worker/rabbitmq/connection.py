"""Connections to RabbitMQ, for the relay, the consumers and the commands `dead-letters` and `doctor`."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial

import aio_pika
import structlog
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq import exceptions
from pamqp.commands import Connection
from yarl import URL

from service.addresses import connect_to_any
from service.command_line import connecting
from service.telemetry import logs
from worker import metrics
from worker.rabbitmq import message_properties, topology
from worker.settings import WorkerSettings

BLOCKED = "RabbitMQ blocks publishers"

# aio-pika raises these when the broker or its network fails, or a timeout expires.
BROKER_ERRORS = (exceptions.AMQPError, exceptions.ChannelInvalidStateError, OSError, TimeoutError)
_REFUSALS = (exceptions.ChannelClosed, exceptions.ConnectionClosed, exceptions.ProbableAuthenticationError)

CLOSE_SECONDS = 2.0  # to close a connection or a consumer cleanly
_HEARTBEAT_SECONDS = 10  # aiormq gives up a silent broker after (10 + 1) * 3 = 33 s.
_DECLARE_SECONDS = 60.0

_log = structlog.get_logger()

message_properties.decode_tolerantly()
connecting.WORDS[_REFUSALS] = "it refuses: {1}"  # RabbitMQ's texts name users, but show no password.
# Otherwise, if RabbitMQ refuses a virtual host, aiormq raises an InvalidFrameError without RabbitMQ's text.
Connection.Open.valid_responses.append("Connection.Close")


class BrokerUnavailable(Exception):
    """RabbitMQ cannot be reached, or did not answer in time."""


@asynccontextmanager
async def open_role(
    settings: WorkerSettings, *, name: str, needs: Collection[str]
) -> AsyncIterator[AbstractChannel]:
    """Connect, and yield a channel with publisher confirms. After any error, the caller calls this again.

    The topology is declared first, and again every _DECLARE_SECONDS, or only checked if the user may not
    configure. Raises BrokerUnavailable if RabbitMQ fails, or if an exchange or queue in *needs* is missing or
    has other properties, which /readyz then reports. If another one differs, this is only logged.
    """
    connected = metrics.broker_connected.labels(name)  # Creates the series, as 0.
    seconds = settings.broker_timeout_seconds
    async with open_connection(settings.amqp_url, name=name, seconds=seconds) as connection:
        channel = await _new_channel(connection, seconds)
        with connected.track_inprogress():
            async with _in_time(seconds):
                creates = await topology.may_create(connection)
                differences = await _declare(connection, creates=creates)
            for needed in needs:
                if needed in differences:
                    raise BrokerUnavailable(differences[needed])
            keeping = asyncio.create_task(_keep_declared(connection, creates=creates))
            try:
                yield channel
            finally:
                keeping.cancel()  # aiormq may swallow this. The closed connection then ends the task.


@asynccontextmanager
async def open_channel(settings: WorkerSettings, *, name: str) -> AsyncIterator[AbstractChannel]:
    """Connect, and yield a channel as `open_role` does, but declare nothing. Raises BrokerUnavailable."""
    seconds = settings.broker_timeout_seconds
    async with open_connection(settings.amqp_url, name=name, seconds=seconds) as connection:
        yield await _new_channel(connection, seconds)


@asynccontextmanager
async def open_connection(url: str | URL, *, name: str, seconds: float) -> AsyncIterator[AbstractConnection]:
    """Connect within *seconds*, yield the connection, and close it. Raises BrokerUnavailable."""
    async with _in_time(seconds):
        asked = URL(url).update_query(heartbeat=_HEARTBEAT_SECONDS, name=name)
        connection = await connect_to_any(partial(aio_pika.connect, asked), seconds=seconds)
    try:
        yield connection
    finally:
        with suppress(*BROKER_ERRORS):
            async with asyncio.timeout(CLOSE_SECONDS):
                await connection.close()


async def _new_channel(connection: AbstractConnection, seconds: float) -> AbstractChannel:
    async with _in_time(seconds):
        return await connection.channel(publisher_confirms=True, on_return_raises=True)


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[None]:
    """Raise BrokerUnavailable when the broker fails or takes longer than *seconds*."""
    try:
        async with asyncio.timeout(seconds):
            yield
    # aiormq raises the last two on a closed connection.
    except (*BROKER_ERRORS, RuntimeError, StopAsyncIteration) as error:
        raise BrokerUnavailable(f"RabbitMQ at AMQP_URL is unavailable: {connecting.reason(error)}") from error


async def _declare(connection: AbstractConnection, *, creates: bool) -> dict[str, str]:
    """Declare the topology. Log the differences, and return them by the name of the exchange or queue."""
    differences = await topology.ensure(connection, creates=creates)
    for name, difference in differences.items():
        _log.error("topology_differs", name=name, difference=difference)
    return differences


async def _keep_declared(connection: AbstractConnection, *, creates: bool) -> None:
    """Declare the topology every _DECLARE_SECONDS while the connection is open.

    This restores a deleted binding. Otherwise events could be lost unnoticed, because the broker returns an
    event only if no queue takes it. There is no timeout, because the broker does not answer during an alarm.
    """
    while not connection.is_closed:
        await asyncio.sleep(_DECLARE_SECONDS)
        try:
            await _declare(connection, creates=creates)
        except Exception as error:  # noqa: BLE001 - the role works without it; the next attempt may succeed
            _log.warning("topology_not_declared", error=logs.summarize(error))
