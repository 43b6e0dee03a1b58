"""The command line of the API and of its operators: `python -m service`."""

import argparse
import sys
from collections.abc import Sequence

from service.calculation_requests.conveyancers import InvalidConveyancer, UnknownConveyancer
from service.calculation_requests.model import RequestNotFound
from service.commands import access_token, api_keys, conveyancers, doctor, documents, requests, schema, serve
from service.commands.command import CommandFailed
from service.operations.operator_arguments import InvalidOperator
from service.postgres.outages import PostgresUnavailable
from service.postgres.schema import SchemaNotApplied, SchemaOutdated
from service.settings import InvalidSetting

_COMMANDS = (serve, documents, doctor, schema, conveyancers, api_keys, requests, access_token)

_EXPECTED = (
    CommandFailed,
    InvalidConveyancer,
    InvalidOperator,
    InvalidSetting,
    PostgresUnavailable,
    RequestNotFound,
    SchemaNotApplied,
    SchemaOutdated,
)


def main(words: Sequence[str]) -> int:
    """Run one command. On failure print one line to stderr and return exit status 1."""
    arguments = parser().parse_args(words)
    try:
        status: int | None = arguments.run(arguments)
    except _EXPECTED as error:
        return _fail(str(error) or error.__doc__ or "")
    except UnknownConveyancer:
        return _fail(
            "No conveyancer is registered under this identifier: see `python -m service conveyancer list`."
        )
    except OSError as error:
        return _fail(str(error) or type(error).__name__)
    return status or 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    root = argparse.ArgumentParser(prog="python -m service", description=__doc__)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    return root


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
