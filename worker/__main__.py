"""The command line of the worker: `python -m worker [relay|notifications|calculations ...]`.

For operators: `python -m worker outbox|emails|dead-letters|trace|reconcile|doctor`, each with `--help`.
"""

import argparse
import socket
import sys
from collections.abc import Sequence

import structlog
import uvloop

from service.server.http_server import listen, spare_loaded_objects, stop_on_signals
from service.settings import InvalidSetting, load
from service.telemetry import logs, tracing
from worker import process
from worker.operating import commands
from worker.process import ROLES
from worker.settings import WorkerSettings

_log = structlog.get_logger()


def main(words: Sequence[str]) -> int:
    """Run the roles named until SIGTERM, or one operator command. Returns the exit status."""
    if words and words[0] in commands.COMMANDS:
        return commands.main(words)
    roles = _roles(words)
    try:
        settings = load(WorkerSettings)
        logs.configure(settings)
        with (
            tracing.exporting(settings, service="calculation-requests-worker"),
            listen(settings.host, settings.health_port) as probes,
        ):
            spare_loaded_objects()
            uvloop.run(_run(settings, roles, probes))
    except InvalidSetting as error:
        print(error, file=sys.stderr)
        return 1
    except BaseExceptionGroup as failures:
        for failure in failures.exceptions:
            _log.critical("worker_failed", **logs.describe(failure))
        return 1
    return 0


async def _run(settings: WorkerSettings, roles: frozenset[str], probes: socket.socket) -> None:
    await process.run(settings, roles, probes, stop_on_signals())


def _roles(words: Sequence[str]) -> frozenset[str]:
    """Return the roles of the command line. Exits with status 2 if one is unknown."""
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("roles", nargs="*", metavar="ROLE", help=f"of {', '.join(ROLES)} (default: all)")
    roles = frozenset(parser.parse_args(words).roles or ROLES)
    if unknown := roles.difference(ROLES):
        parser.error(f"no such role: {', '.join(sorted(unknown))}")
    return roles


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
