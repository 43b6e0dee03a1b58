"""Operator commands: `python -m worker outbox|emails|dead-letters|trace|reconcile|doctor`."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from service.calculation_requests.model import RequestNotFound
from service.operations.operator_arguments import InvalidOperator
from service.postgres import outages
from service.postgres.schema import SchemaOutdated
from service.settings import InvalidSetting
from worker.operating import dead_letters, doctor, emails, outbox, reconcile, trace
from worker.operating.answers import Answer, OperatorError, printable
from worker.operating.arguments import Run
from worker.rabbitmq.connection import BrokerUnavailable

COMMANDS = frozenset({"outbox", "emails", "dead-letters", "trace", "reconcile", "doctor"})

EXPECTED = (
    OperatorError,
    BrokerUnavailable,
    InvalidOperator,
    InvalidSetting,
    RequestNotFound,
    SchemaOutdated,
)


def main(words: Sequence[str]) -> int:
    """Run one command. On failure print one line to stderr and return exit status 1."""
    logging.disable()  # The libraries log what they also raise.
    try:
        options = parser().parse_args(words)
        answer = asyncio.run(execute(options, os.environ))
    except EXPECTED as error:
        return _fail(str(error) or error.__doc__ or "")
    except outages.OUTAGE_ERRORS as error:
        return _fail(f"Postgres at DATABASE_URL is unreachable ({type(error).__name__}).")
    except KeyboardInterrupt:
        return _fail("Interrupted. Work done so far is kept, and the command can be run again.")
    sys.stdout.write(answer.rendered(as_json=options.json) + "\n")
    return answer.status


async def execute(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Run a parsed command and return its answer."""
    run: Run = options.run
    return await run(options, environment)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all operator commands."""
    root = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for command in (outbox, emails, dead_letters, trace, reconcile, doctor):
        command.add_to(commands)
    return root


def _fail(message: str) -> int:
    sys.stderr.write(printable(message) + "\n")
    return 1
