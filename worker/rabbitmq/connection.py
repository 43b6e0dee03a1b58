"""Connections to RabbitMQ, and one name for every way it can be away."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress

import aio_pika
import structlog
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import AMQPError, ChannelInvalidStateError
from yarl import URL

from service.telemetry import logs
from worker import metrics
from worker.rabbitmq import topology
from worker.settings import WorkerSettings

# What aio-pika raises when the broker, its network or the time allowed is at fault.
BROKER_ERRORS = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError)

CLOSE_SECONDS = 2.0  # for the goodbye to the broker
_DECLARE_SECONDS = 60.0

_log = structlog.get_logger()


class BrokerUnavailable(Exception):
    """RabbitMQ cannot be reached, or did not answer in time."""


class TopologyDiffers(BrokerUnavailable):
    """The broker has an exchange or queue that this role needs, but with other properties than ours."""


@asynccontextmanager
async def open_role(
    settings: WorkerSettings, *, name: str, needs: Collection[str]
) -> AsyncIterator[AbstractChannel]:
    """Lend a channel as `open_channel` does, with the topology declared now and again every minute.

    Raises TopologyDiffers when an exchange or queue of *needs* is another; the others' are only logged.
    """
    keeping: asyncio.Task[None] | None = None
    try:
        async with _connect(settings, name) as connection:
            channel = await _open(connection, settings)
            async with _in_time(settings.broker_timeout_seconds):
                differences = await _declare(connection)
            for needed in needs:
                if needed in differences:
                    raise TopologyDiffers(differences[needed])
            keeping = asyncio.create_task(_keep_declared(connection))
            yield channel
    finally:
        if keeping is not None:  # Only now: aiormq may swallow a cancellation, but ends with its connection.
            keeping.cancel()
            await asyncio.wait([keeping], timeout=CLOSE_SECONDS)


@asynccontextmanager
async def open_channel(settings: WorkerSettings, *, name: str) -> AsyncIterator[AbstractChannel]:
    """Connect, and lend a channel with publisher confirms.

    The connection is not a robust one: a caller leaves the block when anything goes wrong, and opens
    another. Raises BrokerUnavailable when it cannot be opened.
    """
    async with _connect(settings, name) as connection:
        yield await _open(connection, settings)


@asynccontextmanager
async def open_connection(url: URL, *, seconds: float) -> AsyncIterator[AbstractConnection]:
    """Lend a connection that is made within *seconds*, and closed in time. Raises BrokerUnavailable."""
    async with _in_time(seconds):
        try:
            connection = await aio_pika.connect(url)
        except StopAsyncIteration as error:  # aiormq's word for a broker, or its proxy, that hung up at once
            raise ConnectionResetError from error
    try:
        yield connection
    finally:
        with suppress(*BROKER_ERRORS):
            async with asyncio.timeout(CLOSE_SECONDS):
                await connection.close()


@asynccontextmanager
async def _connect(settings: WorkerSettings, name: str) -> AsyncIterator[AbstractConnection]:
    metrics.broker_connected.labels(name)  # 0 until it is open
    url = URL(settings.amqp_url).update_query(heartbeat=settings.broker_heartbeat_seconds, name=name)
    async with open_connection(url, seconds=settings.broker_timeout_seconds) as connection:
        with metrics.holding(metrics.broker_connected.labels(name), 1):
            yield connection


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[None]:
    """Raise BrokerUnavailable when the broker is at fault, or takes longer than *seconds*."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except BROKER_ERRORS as error:
        raise BrokerUnavailable from error


async def _open(connection: AbstractConnection, settings: WorkerSettings) -> AbstractChannel:
    async with _in_time(settings.broker_timeout_seconds):
        return await connection.channel(publisher_confirms=True, on_return_raises=True)


async def _declare(connection: AbstractConnection) -> dict[str, str]:
    """Declare the topology, and log what differs."""
    differences = await topology.ensure(connection)
    for name, difference in differences.items():
        _log.error("topology_differs", name=name, difference=difference)
    return differences


async def _keep_declared(connection: AbstractConnection) -> None:
    """Declare again every minute, while the connection is open.

    For a queue of ours that lost its binding: no event comes back as unroutable while another team's queue
    takes it. Without a timeout: during an alarm the answer comes at its end.
    """
    while True:
        await asyncio.sleep(_DECLARE_SECONDS)
        if connection.is_closed:
            return
        try:
            await _declare(connection)
        except Exception as error:  # noqa: BLE001 - the role goes on, and so does this
            _log.warning("topology_not_declared", error=logs.summarize(error))
