"""`make run`: the whole service on this machine until Ctrl-C."""

import time

from deploy.local import environment, example
from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL, Claimed, Place, claimed
from deploy.local.machine.ports import free_port
from deploy.local.stack import running_stack
from deploy.local.terminal import Terminal, port_from

_LOOK_SECONDS = 0.5


def main(terminal: Terminal) -> int:
    """Start everything, print how to use it, and keep it running until Ctrl-C."""
    place = Place(folder=LOCAL, keep=True, report=terminal.report, stopping=terminal.stopping)
    try:
        with claimed(LOCAL / "run.lock"):
            _run(place, terminal)
    except Claimed:
        raise LocalStackError(
            "`make run` is already running in this checkout: use it (. .local/env), or stop it first."
        ) from None
    return 0


def _run(place: Place, terminal: Terminal) -> None:
    ports = environment.Ports(
        api=port_from("PORT", default=8000),
        worker=port_from("HEALTH_PORT", default=free_port()),
        smtp=free_port(),
    )
    began = time.monotonic()
    with running_stack(place, ports) as stack:
        seconds = time.monotonic() - began
        terminal.report(f"\nUp after {seconds:.1f} seconds. Try it in another terminal:\n")
        terminal.report(example.commands(".local/env", ".local/mail"))
        terminal.report(f"API at {stack.variables['BASE_URL']}, worker at {stack.variables['WORKER_URL']}.")
        terminal.report("Logs are in .local/logs, e-mails in .local/mail. Ctrl-C stops everything.\n")
        terminal.report("ready")
        while not terminal.stopping():
            stack.look_after(place)
            time.sleep(_LOOK_SECONDS)
        terminal.report("Stopping …")
    terminal.report("Stopped. The data is kept in .local.")
