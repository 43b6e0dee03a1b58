"""`schema apply`: the schema of the database."""

import click

from service import command_line
from service.command_line import Answer, answering
from service.postgres import schema as database_schema

schema = click.Group("schema", help="The schema of the database.")


@schema.command()
@answering
async def apply() -> Answer:
    """Install the schema in an empty database, or apply missing versions, even to a database in use."""
    async with command_line.postgres(checks_schema=False, statement_seconds=None) as connection:
        before = await database_schema.read_version(connection)
        found = await database_schema.apply(connection)
    done = "is there already" if found == before else "applied"
    needed = database_schema.VERSION
    newer = f"; this release needs {needed}" if found > needed else ""
    return Answer({"version": found}, f"schema version {found} {done}{newer}")
