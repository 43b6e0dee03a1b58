"""The arguments that name the operator of a command, for the command lines of both processes."""

import argparse
import getpass
import os

from service import lines
from service.operations.operator_actions import Operator


class InvalidOperator(Exception):
    """--by: say who runs the command, in one line."""


class InvalidReason(InvalidOperator):
    """--reason: say why, in one line."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that name the operator to a command that changes something."""
    command.add_argument("--by", default=_login(), metavar="NAME", help="who (default: %(default)s)")
    command.add_argument("--reason", metavar="TEXT", help="why; no personal data")


def operator(options: argparse.Namespace) -> Operator:
    """Return the operator whom these arguments name. Raises InvalidOperator and InvalidReason."""
    if lines.check_filled_line(options.by):
        raise InvalidOperator
    if options.reason is not None and lines.check_filled_line(options.reason):
        raise InvalidReason
    return Operator(options.by, options.reason)


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # In a container the user often has no name.
        return f"uid {os.getuid()}"
