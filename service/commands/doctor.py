"""`doctor`: whether the API has what it needs."""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from functools import partial

import httpx
import msgspec
import structlog

from service import diagnosis
from service.authentication.signing_keys import SigningKeysUnavailable, open_signing_keys
from service.calculation_requests.request_secrets import SecretKeyRing
from service.commands.command import Subcommands, add_command
from service.diagnosis import TIMEOUT_SECONDS, Check, Finding, Findings, postgres_check
from service.settings import ServiceSettings, examine


def add_to(commands: Subcommands) -> None:
    """Add the command to the parser."""
    command = add_command(commands, "doctor", doctor)
    command.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes that share Postgres (default: 1)"
    )
    command.add_argument(
        "--timeout-seconds",
        type=float,
        default=TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="for each check (default: %(default)g)",
    )
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")


def doctor(arguments: argparse.Namespace) -> int:
    """Check the settings of the API and the servers they name. Exit status 1 if any check fails."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # The findings say what logs would.
    findings = asyncio.run(
        examine_service(os.environ, processes=arguments.processes, timeout_seconds=arguments.timeout_seconds)
    )
    text = msgspec.json.encode(findings).decode() if arguments.json else diagnosis.rendered(findings)
    sys.stdout.write(text + "\n")
    return diagnosis.exit_status(findings)


async def examine_service(
    environment: Mapping[str, str], *, processes: int, timeout_seconds: float
) -> list[Finding]:
    """Check what the API needs; *processes* is the number of those that share Postgres."""
    settings, problems = examine(ServiceSettings, environment)
    parsers = {"REQUEST_SECRET_KEYS": partial(SecretKeyRing.parse, settings.request_secret_keys)}
    checks = (
        postgres_check(settings, connections=processes * settings.database_connections),
        Check(
            "signing keys",
            ["AUTH_JWKS_URL", "AUTH_JWKS_TIMEOUT_SECONDS"],
            partial(_signing_keys, settings),
            (SigningKeysUnavailable,),
            "what does AUTH_JWKS_URL answer?",
            _reason,
        ),
    )
    return await diagnosis.diagnose(problems, parsers, checks, timeout_seconds=timeout_seconds)


async def _signing_keys(settings: ServiceSettings) -> Findings:
    await open_signing_keys(settings).refresh()
    return [Finding("ok", "signing keys", "fetched, and at least one is usable")]


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, httpx.HTTPStatusError):
        return f"HTTP status {cause.response.status_code}"
    return diagnosis.reason(cause)
