"""`conveyancer add|list|disable|enable`: the law firms that may use the service."""

import argparse
import sys

from service.calculation_requests import conveyancers
from service.commands.command import Subcommands, add_command, add_group, with_connection
from service.operations import disabling, operator_arguments


def add_to(commands: Subcommands) -> None:
    """Add the commands to the parser."""
    group = add_group(commands, "conveyancer", "The law firms that may use the service.")
    adding = add_command(group, "add", add)
    adding.add_argument("id", help="the value of the tenant claim in the firm's access tokens")
    adding.add_argument("--name", required=True, help="the name of the firm")
    adding.add_argument("--charges-calculation-fee", action=argparse.BooleanOptionalAction, default=False)
    add_command(group, "list", list_all)
    for name, run in (("disable", disable), ("enable", enable)):
        command = add_command(group, name, run)
        command.add_argument("id", help="as it was registered")
        operator_arguments.add_arguments(command)


def add(arguments: argparse.Namespace) -> None:
    """Register a conveyancer, or change the name and fee setting of a registered one."""
    is_disabled = with_connection(
        lambda connection: conveyancers.register(
            connection,
            arguments.id,
            name=arguments.name,
            charges_calculation_fee=arguments.charges_calculation_fee,
        )
    )
    still = ", and still disabled" if is_disabled else ""
    sys.stdout.write(f"conveyancer {arguments.id} registered{still}\n")


def list_all(_: argparse.Namespace) -> None:
    """Print the id and name of every conveyancer, whether it charges a fee, and whether it is disabled."""
    for conveyancer in with_connection(conveyancers.list_all):
        fee = "charges-calculation-fee" if conveyancer.charges_calculation_fee else "no-fee"
        state = ["disabled"] if conveyancer.disabled_at else []
        sys.stdout.write("\t".join((conveyancer.id, conveyancer.name, fee, *state)) + "\n")


def disable(arguments: argparse.Namespace) -> None:
    """Refuse a conveyancer's access tokens and API keys from now on. Its customers' links stay open."""
    _set_disabled(arguments, disabled=True)


def enable(arguments: argparse.Namespace) -> None:
    """Serve a conveyancer again that was disabled."""
    _set_disabled(arguments, disabled=False)


def _set_disabled(arguments: argparse.Namespace, *, disabled: bool) -> None:
    by = operator_arguments.operator(arguments)
    with_connection(
        lambda connection: disabling.set_disabled(connection, arguments.id, by, disabled=disabled)
    )
    sys.stdout.write(f"conveyancer {arguments.id} {'disabled' if disabled else 'enabled'}\n")
