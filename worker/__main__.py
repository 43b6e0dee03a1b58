"""The command line of the worker and its operators: `python -m worker`."""

import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial

if __name__ == "__main__":  # PID 1 ignores signals without a handler, and the imports below take seconds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

import click
import structlog
import uvloop

from service.addresses import EventLoop
from service.command_line.answering import run
from service.server.http_server import Address, find_address, spare_loaded_objects, stop_on_signals
from service.settings import load
from service.telemetry import logs, tracing
from worker import process
from worker.commands import dead_letters, doctor, emails, outbox, reconcile, trace
from worker.process import ROLES
from worker.rabbitmq.connection import BrokerUnavailable
from worker.settings import ProcessSettings

_log = structlog.get_logger()


def main(words: Sequence[str]) -> int:
    """Run one role or all roles until SIGTERM, or run one operator command. Returns the exit status."""
    return run(PROGRAM, words, expects=(BrokerUnavailable,))


def _work(roles: Collection[str]) -> int:
    settings = {role: load(ROLES[role].settings) for role in roles}
    of_process = next(iter(settings.values()))
    logs.configure(of_process)
    probes = find_address(of_process.host, of_process.health_port)
    try:
        with tracing.exporting(of_process, service="calculation-requests-worker"):
            spare_loaded_objects()
            uvloop.run(_run(settings, probes), loop_factory=EventLoop)
    except BaseExceptionGroup as failures:
        for failure in failures.exceptions:
            _log.critical("worker_failed", **logs.describe(failure))
        return 1
    return 0


async def _run(settings: Mapping[str, ProcessSettings], probes: Address) -> None:
    await process.run(settings, probes, stop_on_signals())


@click.pass_context
def _work_in_all_roles(context: click.Context) -> int | None:
    return None if context.invoked_subcommand else _work(ROLES)


PROGRAM = click.Group(
    "python -m worker",
    help="Run a worker in one role or, without a command, in all roles. Other commands are for operators.",
    invoke_without_command=True,
    callback=_work_in_all_roles,
    commands=[
        *(
            click.Command(role, callback=partial(_work, [role]), help="Run a worker in this role alone.")
            for role in ROLES
        ),
        outbox.outbox,
        emails.emails,
        dead_letters.dead_letters,
        trace.trace,
        reconcile.reconcile,
        doctor.doctor,
    ],
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
