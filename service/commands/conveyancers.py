"""`conveyancer add|list`: the law firms that may use the service."""

import argparse
import sys

from service.calculation_requests import conveyancers
from service.commands.command import Subcommands, add_command, add_group, with_connection


def add_to(commands: Subcommands) -> None:
    """Add the commands to the parser."""
    group = add_group(commands, "conveyancer", "The law firms that may use the service.")
    adding = add_command(group, "add", add)
    adding.add_argument("id", help="the value of the tenant claim in the firm's access tokens")
    adding.add_argument("--name", required=True, help="the name of the firm")
    adding.add_argument("--charges-calculation-fee", action=argparse.BooleanOptionalAction, default=False)
    add_command(group, "list", list_all)


def add(arguments: argparse.Namespace) -> None:
    """Register a conveyancer, or change the name and fee setting of a registered one."""
    with_connection(
        lambda connection: conveyancers.register(
            connection,
            arguments.id,
            name=arguments.name,
            charges_calculation_fee=arguments.charges_calculation_fee,
        )
    )
    sys.stdout.write(f"conveyancer {arguments.id} registered\n")


def list_all(_: argparse.Namespace) -> None:
    """Print the id and name of every conveyancer, and whether it charges a calculation fee."""
    for conveyancer_id, name, charges in with_connection(conveyancers.list_all):
        fee = "charges-calculation-fee" if charges else "no-fee"
        sys.stdout.write(f"{conveyancer_id}\t{name}\t{fee}\n")
