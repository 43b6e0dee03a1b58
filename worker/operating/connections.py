"""The connections of operator commands, to Postgres and to RabbitMQ."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import asyncpg
import msgspec
from aio_pika.abc import AbstractConnection
from yarl import URL

from service.postgres import schema
from service.postgres.pool import Connection
from service.settings import DatabaseSettings, InvalidSetting, load
from worker.rabbitmq.connection import BROKER_ERRORS, BrokerUnavailable, open_connection
from worker.settings import AmqpUrl

_CONNECT_SECONDS = 10.0
_STATEMENT_SECONDS = 60.0


class BrokerSettings(msgspec.Struct, frozen=True, rename="upper"):
    """The settings of commands that use RabbitMQ alone."""

    amqp_url: AmqpUrl


@asynccontextmanager
async def postgres(environment: Mapping[str, str]) -> AsyncIterator[Connection]:
    """Lend a connection to Postgres. Raises InvalidSetting and SchemaOutdated."""
    try:
        connection: Connection = await asyncpg.connect(
            load(DatabaseSettings, environment).database_url,
            timeout=_CONNECT_SECONDS,
            command_timeout=_STATEMENT_SECONDS,
            statement_cache_size=0,  # not every pooler supports prepared statements
            server_settings={"application_name": "calculation-requests operator"},
        )
    except ValueError:
        raise InvalidSetting("DATABASE_URL: not the address of a Postgres server") from None
    try:
        await schema.check(connection)
        yield connection
    finally:
        await connection.close(timeout=_CONNECT_SECONDS)


def broker_url(environment: Mapping[str, str]) -> URL:
    """Return the address of RabbitMQ. Raises InvalidSetting."""
    try:
        return URL(load(BrokerSettings, environment).amqp_url).update_query(heartbeat=10, name="operator")
    except ValueError:
        raise InvalidSetting("AMQP_URL: not the address of a RabbitMQ server") from None


@asynccontextmanager
async def rabbitmq(environment: Mapping[str, str]) -> AsyncIterator[AbstractConnection]:
    """Lend a connection to RabbitMQ. Declares nothing. Raises InvalidSetting and BrokerUnavailable."""
    url = broker_url(environment)
    try:
        async with open_connection(url, seconds=_CONNECT_SECONDS) as connection:
            yield connection
    except BROKER_ERRORS as error:
        raise BrokerUnavailable from error
