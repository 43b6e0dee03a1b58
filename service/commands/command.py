"""What the commands share: their place in the parser, a connection to Postgres, and the error they raise."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import asyncpg

from service.postgres import outages, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from service.settings import DatabaseSettings, load

Result = TypeVar("Result")
Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - its only name
Run = Callable[[argparse.Namespace], int | None]  # returns the exit status; None is 0


class CommandFailed(Exception):
    """The command cannot do what was asked."""


def add_command(commands: Subcommands, name: str, run: Run) -> argparse.ArgumentParser:
    """Add a command to the parser. The docstring of *run* is its help."""
    command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
    command.set_defaults(run=run)
    return command


def add_group(commands: Subcommands, name: str, description: str) -> Subcommands:
    """Add a command that consists of subcommands."""
    group = commands.add_parser(name, help=description, description=description)
    return group.add_subparsers(required=True, metavar="COMMAND")


def with_connection(work: Callable[[Connection], Awaitable[Result]], *, checks_schema: bool = True) -> Result:
    """Return what *work* returns, given a connection.

    Raises InvalidSetting, PostgresUnavailable and, unless the work is on the schema itself, SchemaOutdated.
    """
    url = load(DatabaseSettings).database_url

    async def run() -> Result:
        connection: Connection = await asyncpg.connect(url, timeout=10)
        try:
            if checks_schema:
                await schema.check(connection)
            return await work(connection)
        finally:
            await connection.close(timeout=10)

    try:
        return asyncio.run(run())
    except outages.OUTAGE_ERRORS as error:  # Caught here: an OSError of a file is not about Postgres.
        reason = f"Postgres at DATABASE_URL is unreachable ({type(error).__name__})."
        raise PostgresUnavailable(reason) from None
