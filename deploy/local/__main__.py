"""The service on this machine: `python -m deploy.local run` or `clean`."""

import argparse
import importlib
import logging
import os
import signal
import sys
from contextlib import suppress

from deploy.local.errors import Interrupted, LocalStackError
from deploy.local.machine.waiting import interrupt


def main() -> int:
    """Run one command. An expected failure is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    parser.add_argument("command", choices=("run", "clean"))
    name = parser.parse_args().command
    os.umask(0o077)  # Passwords, keys and e-mails are below .local.
    # Libraries would log what their exceptions say anyway.
    logging.getLogger().addHandler(logging.NullHandler())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    # Imported by name: `clean` has to work where nothing is installed.
    command = importlib.import_module(f"deploy.local.{name}")
    try:
        command.main(_report)
    except Interrupted:
        _report("Stopped before it was ready.")
        return 0 if name == "run" else 1
    except LocalStackError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except PermissionError as error:
        sys.stderr.write(f"{error.filename}: not permitted. Was it made by another user?\n")
        return 1
    return 0


def _report(line: str) -> None:
    """Print a line now. A closed terminal is ignored."""
    with suppress(OSError):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
