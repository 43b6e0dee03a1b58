"""The command line of the worker: `python -m worker [relay|notifications|calculations ...]`.

For operators: `python -m worker outbox|dead-letters|trace|reconcile|doctor`, each with `--help`.
"""

import argparse
import sys

import structlog
import uvloop

from service.server.garbage import spare_loaded_objects
from service.settings import InvalidSetting, load
from service.telemetry import logs, tracing
from worker import process
from worker.operating import commands
from worker.process import ROLES
from worker.settings import WorkerSettings

_log = structlog.get_logger()


def main() -> int:
    """Run the roles of the command line until SIGTERM, or one operator command. Returns the exit status."""
    if sys.argv[1:2] and sys.argv[1] in commands.COMMANDS:
        return commands.main(sys.argv[1:])
    roles = _roles()
    try:
        settings = load(WorkerSettings)
        logs.configure(settings)
        with tracing.exporting(settings, service="calculation-requests-worker"):
            spare_loaded_objects()
            uvloop.run(process.run(settings, roles))
    except InvalidSetting as error:
        print(error, file=sys.stderr)
        return 1
    except BaseExceptionGroup as failures:
        for failure in failures.exceptions:
            _log.critical("worker_failed", **logs.describe(failure))
        return 1
    return 0


def _roles() -> frozenset[str]:
    """Return the roles of the command line. Exits with status 2 if one is unknown."""
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("roles", nargs="*", metavar="ROLE", help=f"of {', '.join(ROLES)} (default: all)")
    roles = frozenset(parser.parse_args().roles or ROLES)
    if unknown := roles.difference(ROLES):
        parser.error(f"no such role: {', '.join(sorted(unknown))}")
    return roles


if __name__ == "__main__":
    sys.exit(main())
