"""The service on this machine: `python -m deploy.local run`, `demo` or `clean`."""

import argparse
import importlib
import logging
import sys

from deploy.local.errors import Interrupted, LocalStackError
from deploy.local.terminal import Terminal


def main() -> int:
    """Run one command. An expected failure is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    parser.add_argument("command", choices=("run", "demo", "clean"))
    name = parser.parse_args().command
    # Libraries would log what their exceptions say anyway.
    logging.getLogger().addHandler(logging.NullHandler())
    terminal = Terminal()
    # Imported by name: `clean` has to work where nothing is installed.
    command = importlib.import_module(f"deploy.local.{name}")
    try:
        status: int = command.main(terminal)
    except Interrupted:
        terminal.report("Stopped before it was ready.")
        return 0 if name == "run" else 1
    except LocalStackError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except PermissionError as error:
        sys.stderr.write(f"{error.filename}: not permitted. Was it made by another user?\n")
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
