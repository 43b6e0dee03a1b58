"""The fault harness: `python -m tests.faults`. Exit status 1 if an invariant was breached."""

import argparse
import asyncio
import logging
import math
import secrets
import signal
import sys
from functools import partial

import uvloop

from deploy.local.errors import LocalStackError
from tests.faults.broken_programs import BREAKAGES
from tests.faults.catalogue.fault import CLUSTER_FAULTS, FAULTS
from tests.faults.run import LOCAL, Plan, run
from tests.faults.verdict.invariants import check_all
from tests.faults.verdict.records import Record
from tests.faults.verdict.report import table, verdict

_ROUND_SECONDS = 210.0  # in which every fault is injected once, mixed or alone
_say = partial(print, flush=True)


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.cluster:
        arguments.seconds, arguments.requests, arguments.times = math.inf, 0, 1
    if arguments.requests is None:
        arguments.requests = round(arguments.seconds * arguments.rate)
    if arguments.times is None:
        arguments.times = max(1, round(arguments.seconds / _ROUND_SECONDS))
    LOCAL.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=LOCAL / "harness.log", filemode="w", level=logging.WARNING)
    _say(f"seed {arguments.seed}")
    try:
        record = uvloop.run(_run_until_signal(Plan(**vars(arguments))))
    except asyncio.CancelledError:
        _say("stopped")
        return 130
    except LocalStackError as error:
        print(error, file=sys.stderr)
        return 2
    breaches = check_all(record)
    _say("", table(record), "", verdict(breaches), sep="\n")
    return 1 if breaches else 0


async def _run_until_signal(plan: Plan) -> Record:
    """Run the plan. A signal ends it early, and every process it has started."""
    running = asyncio.ensure_future(run(plan, _say))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    return await running


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=1_900.0, help="of faults under load, at least")
    add("--requests", type=int, help="acknowledged, at least (default: seconds times rate)")
    every = f"that every fault is injected, at least (default: once in {_ROUND_SECONDS:.0f} s)"
    add("--times", type=int, help=every)
    add("--rate", type=float, default=20.0, help="requests a second")
    add("--longest-stall", type=float, default=13.0, help="seconds, more than any timeout")
    add("--recovery", type=float, default=5.0, help="seconds allowed after a fault; more on a busy machine")
    add("--drain", type=float, default=120.0, help="seconds allowed to finish at the end")
    add("--seed", type=int, default=secrets.randbelow(10**9), help="of every random choice (default: random)")
    add("--broken", choices=BREAKAGES, help="break the programs on purpose")
    servers = "three nodes of RabbitMQ and a pair of Postgres, each of whose faults is injected once"
    add("--cluster", action="store_true", help=servers)
    names = sorted(fault.name for fault in (*FAULTS, *CLUSTER_FAULTS))
    only = "only these: " + ", ".join(names)
    add("--faults", nargs="*", default=(), choices=names, metavar="NAME", help=only)
    return parser


if __name__ == "__main__":
    sys.exit(main())
