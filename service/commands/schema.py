"""`schema apply`: the schema of the database."""

import asyncio
import time

import click

from service import command_line
from service.command_line import Answer, answering
from service.postgres import schema as database_schema
from service.postgres.outages import PostgresUnavailable

# An init container that ended at once would be restarted with ever longer pauses, of up to five minutes.
_OUTAGE_SECONDS = 600.0
_PAUSE_SECONDS = 1.0

schema = click.Group("schema", help="The schema of the database.")


@schema.command()
@answering
async def apply() -> Answer:
    """Install the schema in an empty database, or apply missing versions, even to a database in use.

    During an outage of Postgres, the command waits for up to ten minutes.
    """
    deadline, reason = time.monotonic() + _OUTAGE_SECONDS, ""
    while True:
        try:
            return await _apply()
        except PostgresUnavailable as error:
            if time.monotonic() > deadline:
                raise
            if str(error) != reason:
                reason = str(error)
                click.echo(f"{reason} Waiting for it.", err=True)
        await asyncio.sleep(_PAUSE_SECONDS)


async def _apply() -> Answer:
    async with command_line.postgres(checks_schema=False, statement_seconds=None) as connection:
        before = await database_schema.read_version(connection)
        found = await database_schema.apply(connection)
    done = "is there already" if found == before else "applied"
    needed = database_schema.VERSION
    newer = f"; this release needs {needed}" if found > needed else ""
    return Answer({"version": found}, f"schema version {found} {done}{newer}")
