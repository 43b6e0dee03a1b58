"""`openapi` and `asyncapi`: the documents of the HTTP API and of the messages."""

import argparse
import sys
from pathlib import Path

import msgspec

from service.commands.command import CommandFailed, Subcommands, add_command
from service.contracts import asyncapi, compatibility, openapi


def add_to(commands: Subcommands) -> None:
    """Add the commands to the parser."""
    add_command(commands, "openapi", print_openapi)
    describe = add_command(commands, "asyncapi", print_asyncapi)
    describe.add_argument(
        "--update", type=Path, metavar="FILE", help="replace this file unless the change is breaking"
    )


def print_openapi(_: argparse.Namespace) -> None:
    """Print the OpenAPI document of the HTTP API."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(openapi.document())).decode() + "\n")


def print_asyncapi(arguments: argparse.Namespace) -> None:
    """Print the AsyncAPI document of the messages, or update a file with it."""
    document = asyncapi.document()
    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    if arguments.update is None:
        sys.stdout.write(text)
        return
    if arguments.update.exists():
        broken = compatibility.breaks(msgspec.json.decode(arguments.update.read_bytes()), document)
        if broken:
            raise CommandFailed("\n".join(("The change breaks consumers or senders:", *broken)))
    arguments.update.write_text(text)
