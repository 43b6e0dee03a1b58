"""`schema apply`: the schema of the database."""

import argparse
import sys

from service.commands.command import Subcommands, add_command, add_group, with_connection
from service.postgres import schema


def add_to(commands: Subcommands) -> None:
    """Add the command to the parser."""
    add_command(add_group(commands, "schema", "The schema of the database."), "apply", apply)


def apply(_: argparse.Namespace) -> None:
    """Lay the schema into an empty database, or apply the versions that it lacks. It may be in use."""
    found = with_connection(schema.apply, checks_schema=False)
    newer = f"; this release needs {schema.VERSION}" if found > schema.VERSION else ""
    sys.stdout.write(f"schema version {found} applied{newer}\n")
