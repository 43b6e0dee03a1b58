"""`make run`: the whole service on this machine until Ctrl-C."""

import os
import time

from deploy.local import environment
from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL, Claimed, Place, Report, claimed
from deploy.local.machine.ports import free_port
from deploy.local.machine.waiting import is_interrupted
from deploy.local.stack import running_stack

_LOOK_SECONDS = 0.5
_LEFTOVER_SECONDS = 10.0  # The children of a run that was killed end on their own, and free its lock.


def main(report: Report) -> None:
    """Start everything, print how to use it, and keep it running until Ctrl-C."""
    place = Place(folder=LOCAL, keep=True, report=report)
    try:
        with claimed(LOCAL, seconds=_LEFTOVER_SECONDS):
            _run(place)
    except Claimed:
        raise LocalStackError(
            "`make run` is already running in this checkout: use it (. .local/env), or stop it first."
        ) from None


def _run(place: Place) -> None:
    environment.forget()
    ports = environment.Ports(
        api=port_from("PORT", default=8000),
        api_probes=free_port(),
        worker=free_port(),
        smtp=free_port(),
        journey=port_from("JOURNEY_PORT", default=8010),
    )
    with running_stack(place, ports) as stack:
        place.report(f"API at {stack.variables['BASE_URL']}, worker at {stack.variables['WORKER_URL']}.")
        place.report("Calls to copy are in README.md. Logs are in .local/logs. Ctrl-C stops everything.\n")
        place.report("ready")
        place.report(f"Open {stack.journey_url}")
        while not is_interrupted():
            stack.look_after(place)
            time.sleep(_LOOK_SECONDS)
        place.report("Stopping …")
    place.report("Stopped. The data is kept in .local.")


def port_from(variable: str, *, default: int) -> int:
    """Return the port in an environment variable. Raises LocalStackError if it is not a port."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise LocalStackError(f"{variable} must be a number from 1 to 65535.")
    return int(text)
