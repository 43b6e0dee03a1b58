"""`schema apply`: the schema of the database."""

import asyncio
import time

import click

from service.command_line import connecting
from service.command_line.answering import Answer, answering
from service.postgres import schema as database_schema
from service.postgres.outages import PostgresUnavailable, is_rejected_login

# An init container that ended at once would be restarted with ever longer pauses, of up to five minutes.
_OUTAGE_SECONDS = 600.0
# A container gets a changed Secret only when it starts again.
_REJECTED_SECONDS = 60.0
_PAUSE_SECONDS = 1.0

schema = click.Group("schema", help="The schema of the database.")


@schema.command()
@answering
async def apply() -> Answer:
    """Install the schema in an empty database, or apply missing versions, even to a database in use.

    It waits for Postgres, for up to ten minutes or, if Postgres rejects the login, for a minute.
    """
    began, reason = time.monotonic(), ""
    while True:
        try:
            async with connecting.postgres(applies_schema=True) as connection:
                found = await database_schema.apply(connection)
            break
        except PostgresUnavailable as error:
            seconds = _REJECTED_SECONDS if is_rejected_login(error) else _OUTAGE_SECONDS
            if time.monotonic() > began + seconds:
                raise
            if str(error) != reason:
                reason = str(error)
                click.echo(f"{reason}; waiting for it", err=True)
        await asyncio.sleep(_PAUSE_SECONDS)
    needed = database_schema.VERSION
    newer = f" (this release needs {needed})" if found > needed else ""
    text = f"the schema has version {found}{newer}, and each role has its rights"
    return Answer({"version": found}, text)
