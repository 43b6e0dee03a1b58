"""`api-key create|list|revoke`: the keys that give access to the questionnaire."""

import argparse
import sys

from service.authentication import api_keys
from service.commands.command import CommandFailed, Subcommands, add_command, add_group, with_connection


def add_to(commands: Subcommands) -> None:
    """Add the commands to the parser."""
    group = add_group(commands, "api-key", "The keys that give access to the questionnaire.")
    add_command(group, "create", create).add_argument(
        "conveyancer_id", help="the conveyancer, as it was registered"
    )
    add_command(group, "list", list_all)
    add_command(group, "revoke", revoke).add_argument("prefix", help="the second part of cr_<prefix>_…")


def create(arguments: argparse.Namespace) -> None:
    """Create an API key and print it. It cannot be shown again."""
    key = with_connection(lambda connection: api_keys.create(connection, arguments.conveyancer_id))
    sys.stdout.write(f"{key}\n")


def revoke(arguments: argparse.Namespace) -> None:
    """Revoke the API key with this prefix."""
    if not with_connection(lambda connection: api_keys.revoke(connection, arguments.prefix)):
        raise CommandFailed("No valid API key has this prefix: see `python -m service api-key list`.")
    sys.stdout.write(f"{arguments.prefix} revoked\n")


def list_all(_: argparse.Namespace) -> None:
    """Print the prefix and conveyancer of every API key, and when it was created, last used and revoked."""
    for key in with_connection(api_keys.list_all):
        times = (key.created_at, key.last_used_at, key.revoked_at)
        shown = (f"{time:%Y-%m-%dT%H:%M:%SZ}" if time else "-" for time in times)
        sys.stdout.write("\t".join((key.prefix, key.conveyancer_id, *shown)) + "\n")
