"""`request correct|new-secret`: the customer's address and the link of one request."""

import argparse
import sys
from uuid import UUID

from service.calculation_requests import email_addresses
from service.calculation_requests.request_secrets import SecretKeyRing
from service.commands.command import CommandFailed, Subcommands, add_command, add_group, with_connection
from service.identifiers import parse_uuid
from service.operations import correcting, operator_arguments
from service.operations.correcting import Changed
from service.settings import Settings, load


def add_to(commands: Subcommands) -> None:
    """Add the commands to the parser."""
    group = add_group(commands, "request", "The customer's address and the link of one request.")
    correction = add_command(group, "correct", correct)
    renewal = add_command(group, "new-secret", renew_secret)
    for command in (correction, renewal):
        command.add_argument("uuid", help="req_…")
        command.add_argument("--no-email", action="store_true", help="send no e-mail with the new link")
        operator_arguments.add_arguments(command)
    correction.add_argument("--customer-email", required=True, metavar="ADDRESS")


def correct(arguments: argparse.Namespace) -> None:
    """Correct the customer's address. The link that was sent is dead; the right customer gets a new one."""
    address = arguments.customer_email
    if not email_addresses.is_accepted(address):
        raise CommandFailed("--customer-email: expected the e-mail address of exactly one recipient.")
    changed = _change(arguments, "request correct", address)
    if changed is None:
        said = "has this address already: nothing was changed"
    else:
        said = f"corrected, with a new secret; {_email(changed)}"
    sys.stdout.write(f"{arguments.uuid} {said}\n")


def renew_secret(arguments: argparse.Namespace) -> None:
    """Make a new link for the customer. The one that was sent is dead, also if this command sent it."""
    changed = _change(arguments, "request new-secret", None)
    if changed is not None:
        sys.stdout.write(f"{arguments.uuid} has a new secret; {_email(changed)}\n")


def _email(changed: Changed) -> str:
    return f"e-mail {changed.email} is due" if changed.email else "no e-mail is sent"


def _change(arguments: argparse.Namespace, action: str, customer_email: str | None) -> Changed | None:
    request_id = _request_id(arguments.uuid)
    keys = SecretKeyRing.parse(load(Settings).request_secret_keys)
    change = correcting.Change(
        action=action,
        by=operator_arguments.operator(arguments),
        customer_email=customer_email,
        sends_email=not arguments.no_email,
    )
    return with_connection(lambda connection: correcting.carry_out(connection, request_id, change, keys=keys))


def _request_id(text: str) -> UUID:
    request_id = parse_uuid(text)
    if request_id is None:
        raise CommandFailed(f"{text!r} is not the uuid of a request: req_ and 22 letters or digits.")
    return request_id
